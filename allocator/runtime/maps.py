"""What this process has loaded, as the system tells it."""

from __future__ import annotations

_MAPS = "/proc/self/maps"


def loaded_files() -> set[str]:
    """The paths of the files that this process has in its memory, such as shared libraries.

    Example:
        >>> any("python" in path for path in loaded_files())
        True
    """
    with open(_MAPS) as maps:
        return {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "/" in line}
