"""Keeps torch's OpenMP threads asleep while a kernel runs.

After a parallel region OpenMP's threads spin for a while, so that the next region starts at once. A
kernel that runs meanwhile shares its cores with them, and they get the larger share of each core
that they are on. So before it launches, a thread opens a parallel region of its own, in which the
others sleep on a lock. It closes the region when the kernel has ended. The others then spin again,
for the next region. docs/design/sleeping-threads.md says what that gains.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

WORTH_SLEEPING = 250_000
"""From this many elements on, a launch gains more from free cores than it costs to free them."""
_Lock = ctypes.c_int64 * 7
"""POSIX's read-write lock; all zeros is an unlocked one."""
_Mutex = ctypes.c_int32 * 10
"""POSIX's mutex; all zeros is an unlocked one. The third number is the owner's thread ID."""
_call = operator.methodcaller("__call__")


class _Functions(NamedTuple):
    threads: Callable[[], int]
    start_region: Any
    end_region: Any
    lock: Any
    unlock: Any
    share: ctypes.c_void_p
    try_to_lock: ctypes.c_void_p


class _Worker:
    """One OpenMP thread of a team, whose threads all do the same."""

    def __init__(self, thread: int) -> None:
        self._clock = ~thread << 3 | 6  # of its processor time, as Linux numbers clocks
        self._stat = os.open(f"/proc/self/task/{thread}/stat", os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_stat"):
            os.close(self._stat)

    def spins(self) -> bool:
        """Whether the thread spins rather than sleeps; an OSError if it has ended."""
        if time.clock_gettime_ns(self._clock) != time.clock_gettime_ns(self._clock):
            return True
        # It sleeps, or another thread has its core. The clock is read first because that is
        # quicker.
        return os.pread(self._stat, 64, 0).rpartition(b")")[2].startswith(b" R")


class _Team(threading.local):
    """The calling thread's OpenMP threads."""

    def __init__(self) -> None:
        self.worker: _Worker | None = None
        """One of them, once it is known."""
        self.lock = _Lock()
        """The lock on which they sleep, or last slept."""
        self.asleep: list[Any] = []
        """Not empty while they sleep."""


_team = _Team()


@functools.cache
def _functions() -> _Functions | None:
    # The process has the runtime that torch calls, even if a preloaded one takes over. PyDLL keeps
    # the GIL: if other threads want it, a call that releases it waits to get it back.
    process = ctypes.PyDLL(None)
    try:
        start, end = process.GOMP_parallel_start, process.GOMP_parallel_end
    except AttributeError:  # torch was built without OpenMP, or cannot be imported
        return None
    from torch import get_num_threads  # not above: the doctor works where torch is broken

    start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint), None
    end.argtypes, end.restype = (), None
    for_workers = process.pthread_rwlock_rdlock, process.pthread_mutex_trylock
    share, try_to_lock = (ctypes.cast(function, ctypes.c_void_p) for function in for_workers)
    locks = process.pthread_rwlock_wrlock, process.pthread_rwlock_unlock
    return _Functions(get_num_threads, start, end, *locks, share, try_to_lock)


def put_to_sleep() -> None:
    """Put the calling thread's OpenMP threads to sleep until :func:`wake`, if they spin.

    Call this before the launch, while no kernel has the cores that the threads need to fall asleep.
    Threads that already sleep are left alone, as waking them takes time.
    """
    functions = _functions()
    if functions is None or _team.asleep or (threads := functions.threads()) == 1:
        return
    try:
        if _team.worker is None:
            _team.worker = _one_of(functions, threads)
        elif not _team.worker.spins():
            return
    except OSError:  # it has ended
        _team.worker = None
    _team.lock = _Lock()  # a new one, as the threads do not unlock it
    lock = ctypes.byref(_team.lock)
    start = functools.partial(functions.start_region, functions.share, lock, threads)
    # In one C call: no interrupt can come between a region's start and the note of it.
    _team.asleep.extend(map(_call, (functools.partial(functions.lock, lock), start)))


def _one_of(functions: _Functions, threads: int) -> _Worker | None:
    """The thread that locks a mutex first; None inside a region, which has no other threads."""
    mutex = _Mutex()
    lock = ctypes.byref(mutex)
    start = functools.partial(functions.start_region, functions.try_to_lock, lock, threads)
    list(map(_call, (start, functions.end_region)))
    return _Worker(mutex[2]) if mutex[2] else None


def wake() -> None:
    """Wake the threads that :func:`put_to_sleep` has put to sleep, if any."""
    call_and_wake(int)


def call_and_wake(function: Callable[[], int]) -> int:
    """Call a function, then wake the calling thread's OpenMP threads if they were put to sleep.

    It must be a C function that raises no error, so that no interrupt comes in between.
    """
    functions = _functions() if _team.asleep else None
    if functions is None:
        return function()
    unlock = functools.partial(functions.unlock, ctypes.byref(_team.lock))
    calls = function, unlock, functions.end_region, _team.asleep.clear
    results: list[int] = list(map(_call, calls))
    return results[0]
