"""A thread's cores and its OpenMP threads, on which torch runs its operations.

See docs/design/pinned-threads.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fusedoptim.runtime._cores import listed, process_cores

_TASKS = "/proc/self/task"
_forked: list[int] = []
"""The thread that forked this process; its OpenMP threads have not survived."""


class _OpenMP(NamedTuple):
    """The functions of the OpenMP runtime and of MKL that torch calls, for the calling thread."""

    threads: Callable[[], int]
    """How many threads its next parallel region gets."""
    set_threads: Callable[[int], None]
    set_mkl_threads: Callable[[int], int]
    """Sets the number for MKL's functions (0: OpenMP's number), and returns the previous one."""
    region: Callable[..., None]
    """``GOMP_parallel``: have each thread call a function with an argument, and wait for them."""


@functools.cache
def _openmp() -> _OpenMP:
    import torch  # not above: the doctor works where torch is broken

    process = ctypes.CDLL(None)
    try:
        threads, set_threads = process.omp_get_max_threads, process.omp_set_num_threads
        region = process.GOMP_parallel
    except AttributeError:
        raise RuntimeError(
            "this torch was built without OpenMP, so its threads cannot be pinned; install a "
            "release from PyPI, or start the program with taskset"
        ) from None
    set_threads.argtypes, set_threads.restype = (ctypes.c_int,), None
    region.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    region.restype = None
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    # Without MKL, torch calls BLAS libraries that follow OpenMP.
    set_mkl_threads = getattr(library, "MKL_Set_Num_Threads_Local", lambda count: 0)
    return _OpenMP(threads, set_threads, set_mkl_threads, region)


def _team(count: int) -> list[int]:
    """Linux's numbers of the calling thread's OpenMP threads; missing ones are started."""
    ids: list[int] = []
    # It runs only C code: an interrupt in a Python function that OpenMP calls would be lost.
    calls = itertools.starmap(threading.get_native_id, itertools.repeat(()))
    note = ctypes.CFUNCTYPE(None)(functools.partial(next, map(ids.append, calls)))
    _openmp().region(note, None, count, 0)
    return ids


def _others(count: int) -> list[int]:
    """The calling thread's OpenMP threads, except itself."""
    return [thread for thread in _team(count) if thread != threading.get_native_id()]


def _set_cores(thread: int, cores: frozenset[int]) -> None:
    """Set a thread's cores, unless it has ended: another process may then have its number."""
    if os.path.exists(f"{_TASKS}/{thread}"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


class Settings:
    """What the calling thread had before it was pinned, and how it gets that back."""

    def __init__(self) -> None:
        import torch

        self._openmp = _openmp()  # raises if torch has none, before anything is changed
        self.cores = frozenset(os.sched_getaffinity(0))
        self.threads = torch.get_num_threads()  # makes torch set them too, before we do
        self.mkl_threads: list[int] = []
        """MKL's number, once it was changed."""
        self.team: dict[int, frozenset[int] | None] = {}
        """The cores to restore for each OpenMP thread, by Linux's number of the thread; None for a
        thread that was started since, which gets the calling thread's cores."""

    def change(self, cores: frozenset[int]) -> None:
        """Pin the calling thread and its OpenMP threads, one for each core.

        Raises:
            RuntimeError: the thread's OpenMP threads have not survived a fork.
            ValueError: a core is no longer this process's.
        """
        openmp, count = self._openmp, len(cores)
        if count > 1 and threading.get_ident() in _forked:
            raise RuntimeError(
                f"pin() cannot start OpenMP threads on cores {listed(cores)}: this process was "
                "forked, and its parent's threads did not survive the fork; call the pool's "
                "submit(), pin to one core, or start processes by the method 'spawn'"
            )
        lost = cores - process_cores()  # Linux would let a thread leave the process's affinity
        if not lost:
            with contextlib.suppress(OSError):  # it may use none of them: the error below says so
                os.sched_setaffinity(0, cores)
            lost = cores - os.sched_getaffinity(0)
        if lost:
            raise ValueError(
                f"pool: this process may no longer use core {listed(lost)}; make another CPUPool"
            )
        openmp.set_threads(count)
        self.mkl_threads.extend(map(openmp.set_mkl_threads, (count,)))
        if count > 1:
            before = set(os.listdir(_TASKS))
            for thread in _others(count):
                is_new = str(thread) not in before
                self.team[thread] = None if is_new else frozenset(os.sched_getaffinity(thread))
                _set_cores(thread, cores)

    def restore(self) -> None:
        """Undo :meth:`change`, also one that was interrupted; a second call changes nothing."""
        openmp = self._openmp
        os.sched_setaffinity(0, self.cores)
        if not self.mkl_threads:
            openmp.set_threads(self.threads)  # it may have been interrupted after that
            return
        count = openmp.threads()  # as many as cores, unless the program has set another number
        if count > 1 and threading.get_ident() not in _forked:
            self.team = dict.fromkeys(_others(count)) | self.team
        for thread, cores in self.team.items():
            _set_cores(thread, cores or self.cores)
        openmp.set_threads(self.threads)
        openmp.set_mkl_threads(self.mkl_threads[0])


def _note_fork() -> None:
    _forked[:] = [threading.get_ident()]


os.register_at_fork(after_in_child=_note_fork)
