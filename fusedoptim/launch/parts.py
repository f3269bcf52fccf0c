"""Runs a launch in parts on torch's own threads, as torch runs its operations.

One of the driver's queues runs a kernel on the thread that enqueues it. So a launch is an OpenMP
parallel region whose threads each enqueue parts of it. A thread begins with the part of its own
number, as its core may have those elements in its cache since the last launch. Then it takes others
until none is left. The driver's threads stay out of it: they would share the cores with torch's.
docs/design/torch-threads.md says what that gains.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fusedoptim.launch.modules import check_code

CODE = Path(__file__).with_name("run_parts.x86_64")
"""Machine code, written by ``make kernels``. It begins with the function that runs a launch."""
_LEAST = 32 * 1024
"""The least number of elements of a part: its work must take longer than waking a thread."""
_MANY, _PARTS_EACH = 2 << 20, 8
"""A thread gets one part for each ``_MANY`` elements, at most ``_PARTS_EACH``: threads that are
done take over parts of threads whose cores have other work. But enqueuing a part takes time."""


class Parts(ctypes.Structure):
    """A launch that is cut into parts, as the machine code reads it: see kernels/_native.py."""

    _fields_ = (
        ("next", ctypes.c_int64),  # the next part for a thread that has run its own
        ("taken", ctypes.c_int64),  # a bit for each of the first 64 parts: it has begun
        ("done", ctypes.c_int64),  # groups that have run
        ("status", ctypes.c_int64),  # the error of a part that the driver refused
        ("groups", ctypes.c_int64),
        ("each", ctypes.c_int64),  # groups of a part
        ("lanes", ctypes.c_int64),
        ("enqueue", ctypes.c_void_p),
        ("queue", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("region", ctypes.c_void_p),  # as in Team; None for the calling thread alone
        ("thread_number", ctypes.c_void_p),  # as in Team
        ("meanwhile", ctypes.c_void_p),  # as in Frame
    )


class Team(NamedTuple):
    """The OpenMP threads that torch runs its operations on, as the calling thread sees them."""

    threads: Callable[[], int]
    """Returns how many threads there are, this one included, as ``torch.get_num_threads`` does."""
    region: int
    """The address of ``GOMP_parallel``, which makes each thread call a function with an
    argument."""
    thread_number: int
    """The address of ``omp_get_thread_num``, which returns the number of the calling thread."""
    run: Callable[[int], int]
    """Runs the launch whose :class:`Parts` are at an address, and returns the driver's answer.
    There is one argument because ctypes needs longer for several than OpenMP for a region."""
    run_short: Callable[[int], int]
    """Like :attr:`run`, for short launches: other Python threads wait meanwhile."""


def parts_of(groups: int, elements: int, threads: int, is_light: bool) -> int:
    """The number of parts for a launch of ``groups`` groups over about ``elements`` elements."""
    if threads == 1:
        return 1
    one_each, many = elements // _LEAST, _MANY
    if is_light:
        # The driver begins one part after another, each in a time c. So p parts take w / p + p * c
        # for work that takes w on one core, which is least for p = sqrt(w / c). Adding up _LEAST
        # elements takes about c.
        one_each, many = math.isqrt(one_each), 2 * _MANY
    several_each = min(elements // many, _PARTS_EACH) * threads
    return max(min(groups, max(min(one_each, threads), several_each)), 1)


@functools.cache
def team() -> Team | None:
    """The threads, or None where torch has none or no file can be mapped as code."""
    try:
        code = _code_address()
        openmp = ctypes.CDLL(None)
        region, number = map(_address, (openmp.GOMP_parallel, openmp.omp_get_thread_num))
        from torch import get_num_threads  # not above: the doctor works where torch is broken
    except (AttributeError, ImportError, OSError):
        return None
    of_code = ctypes.c_int, ctypes.c_void_p
    run, run_short = ctypes.CFUNCTYPE(*of_code)(code), ctypes.PYFUNCTYPE(*of_code)(code)
    return Team(get_num_threads, region, number, run, run_short)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _code_address() -> int:
    with CODE.open("rb") as file:
        code = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    check_code(code[:])
    _mapped.append(code)
    return int(np.frombuffer(code, np.uint8).ctypes.data)


_mapped: list[mmap.mmap] = []
"""What is mapped stays for as long as the process lives."""
