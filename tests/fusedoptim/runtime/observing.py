"""On which cores the threads of this process may run, and which of them ran in a call.

Imports torch only, for scripts in processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

CORES = sorted(os.sched_getaffinity(0))
"""The cores of this process, before anything is pinned."""
_TASKS = Path("/proc/self/task")
_BIG = torch.ones(1 << 21)


def masks() -> dict[int, list[int]]:
    """The cores that each thread may run on, as Linux reports them."""
    found = {}
    for task in _TASKS.iterdir():
        try:
            status = (task / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            continue
        text = status.partition("Cpus_allowed_list:")[2].split()[0]
        parts = [list(map(int, part.split("-"))) for part in text.split(",")]
        found[int(task.name)] = [core for a in parts for core in range(a[0], a[-1] + 1)]
    return found


def _nanoseconds() -> dict[int, int]:
    """The processor time of each thread, by its number, from the clock that Linux gives it."""
    found = {}
    for task in map(int, os.listdir(_TASKS)):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            found[task] = time.clock_gettime_ns(~task << 3 | 6)
    return found


def compute() -> float:
    """Some of torch's operations by OpenMP, oneDNN and MKL, long enough to see each thread run."""
    for _ in range(5):
        _BIG.add(1)
    square = _BIG[: 1 << 18].view(512, 512)
    return float((square @ square).sum() + (square.double() @ square.double()).sum())


def ran(call: Callable[[], object] = compute) -> dict[int, list[int]]:
    """The cores of each thread that spent more than a millisecond of processor time on a call."""
    call()
    time.sleep(0.05)  # threads that spin fall asleep meanwhile
    before = _nanoseconds()
    call()
    after, cores = _nanoseconds(), masks()
    return {t: cores[t] for t, spent in after.items() if spent - before.get(t, 0) > 1_000_000}
