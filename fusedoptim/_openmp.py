"""Keeps torch's OpenMP threads asleep while a kernel runs.

After a parallel region OpenMP's threads spin for milliseconds, so that the next region starts at
once. A kernel that runs meanwhile shares its cores with them, and theirs is the larger share of
each core that they are on. So a thread waits for its kernel in a parallel region of its own, in
which the others sleep on a lock. They are woken when the kernel has ended, and spin again for the
next region. On 16 cores a step of 4 M elements between torch's operations took 2.7 ms, and 0.6 ms
with the threads asleep.
"""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

WORTH_SLEEPING = 250_000
"""Elements from which a launch gains more by free cores than putting the threads to sleep costs.

On 16 cores a step of 64,000 takes 101 us with them asleep and 81 us with them left alone; one of
250,000 takes 138 and 233 us.
"""
_Lock = ctypes.c_int64 * 7
"""POSIX's read-write lock; zeros are one that nobody has."""
_call = operator.methodcaller("__call__")


class _Functions(NamedTuple):
    threads: Callable[[], int]
    start_region: Any
    end_region: Any
    lock: Any
    unlock: Any
    share: ctypes.c_void_p


@functools.cache
def _functions() -> _Functions | None:
    # The process has what torch calls, also where a preloaded runtime takes over. PyDLL keeps
    # Python's lock: where other threads want it, each call that gives it away takes 5 ms.
    process = ctypes.PyDLL(None)
    try:
        start, end = process.GOMP_parallel_start, process.GOMP_parallel_end
    except AttributeError:  # torch was built without OpenMP, or cannot be imported
        return None
    from torch import get_num_threads  # not above: the doctor works where torch is broken

    start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint), None
    end.argtypes, end.restype = (), None
    share = ctypes.cast(process.pthread_rwlock_rdlock, ctypes.c_void_p)
    locks = process.pthread_rwlock_wrlock, process.pthread_rwlock_unlock
    return _Functions(get_num_threads, start, end, *locks, share)


def call_with_threads_asleep(function: functools.partial[int]) -> int:
    """Call a function while the calling thread's OpenMP threads sleep.

    Args:
        function: of C, with its arguments. It raises no error.

    Returns:
        what it returns.
    """
    functions = _functions()
    if functions is None or (threads := functions.threads()) == 1:
        return function()
    lock = ctypes.byref(_Lock())
    functions.lock(lock)
    start = functools.partial(functions.start_region, functions.share, lock, threads)
    wake = functools.partial(functions.unlock, lock)
    # In one call of C, as an interrupt between them would leave the threads asleep.
    calls = start, function, wake, functions.end_region
    results: list[int] = list(map(_call, calls))
    return results[1]
