"""The files that this process has mapped, according to the operating system."""

from __future__ import annotations

_MAPS = "/proc/self/maps"


def loaded_files() -> set[str]:
    """The paths of the files that this process has mapped, such as shared libraries.

    Example:
        >>> any("python" in path for path in loaded_files())
        True
    """
    with open(_MAPS) as maps:
        return {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "/" in line}
