"""What Linux reports about the processor."""

from __future__ import annotations

import functools
import re
from pathlib import Path

PROCESSORS = Path("/proc/cpuinfo")


def processor_facts() -> dict[str, str]:
    """The fields of the first processor, such as "vendor_id" and "flags".

    Raises:
        OSError: Linux does not report it.
    """
    first = PROCESSORS.read_text().split("\n\n")[0]
    return dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))


@functools.cache
def has_tiles() -> bool:
    """Whether the processor multiplies tiles of 16-bit numbers (Intel's AMX)."""
    try:
        return "amx_bf16" in processor_facts().get("flags", "").split()
    except OSError:
        return False
