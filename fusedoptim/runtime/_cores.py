"""The cores that this process may use, and the NUMA node of each."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_CORES = Path("/sys/devices/system/cpu")

unpinned: dict[int, frozenset[int]] = {}
"""The cores that a pinned thread has outside of all its pins, by the thread's identifier."""


def process_cores() -> frozenset[int]:
    """The cores of the process: those of its main thread, outside of all pins."""
    main = threading.main_thread().ident or 0
    return unpinned.get(main) or frozenset(os.sched_getaffinity(os.getpid()))


def nodes() -> dict[int, frozenset[int]]:
    """The cores of each NUMA node by its number, or one node 0 where Linux names none."""
    found = {
        int(folder.name.removeprefix("node")): parsed((folder / "cpulist").read_text())
        for folder in _NODES.glob("node[0-9]*")
    }
    return dict(sorted(found.items())) or {0: process_cores()}


def one_of_each(cores: Iterable[int]) -> frozenset[int]:
    """One hardware thread of each physical core: the one with the lowest number."""
    allowed = frozenset(cores)
    return frozenset(core for core in allowed if core == min(_siblings(core) & allowed))


def _siblings(core: int) -> frozenset[int]:
    """The hardware threads of a core, this one included."""
    file = _CORES / f"cpu{core}" / "topology" / "thread_siblings_list"
    return (parsed(file.read_text()) if file.exists() else frozenset()) | {core}


def parsed(text: str) -> frozenset[int]:
    """The numbers in a list as the Linux kernel writes it, such as ``0-3,8``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def listed(cores: Iterable[int]) -> str:
    """Numbers as such a list, which ``taskset -c`` accepts."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
