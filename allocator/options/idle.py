"""Idle decay: returns free memory to the driver after some time without use."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import weakref
from typing import Any

from allocator.pool.core import Core
from allocator.pool.sizes import as_number
from allocator.pool.store import Store

_CHECKS = 4
"""The number of checks within the time that memory may stay unused; it stays at most 1/4 longer."""


def checked_seconds(seconds: Any) -> float:
    """The time that free memory may stay, in seconds; raises TypeError or ValueError."""
    # An integer may be too large for a float.
    if not 0 < as_number(seconds, "idle_seconds") <= sys.float_info.max:
        raise ValueError(
            f"idle_seconds={seconds!r} is not positive and finite; None keeps free memory"
        )
    return float(seconds)


class Decay:
    """A thread that checks a pool periodically, without keeping it alive."""

    def __init__(self, core: Core, seconds: float) -> None:
        self._seconds = seconds
        # put() of a SimpleQueue may be called at any moment, even by a weak reference's callback
        # within its own get(); an Event would deadlock.
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        end = self._end
        self._core = weakref.ref(core, lambda _: end.put(None))
        self._thread = threading.Thread(target=self._run, name="idle decay", daemon=True)
        _decays.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._end.put(None)

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def check(self, core: Core) -> None:
        """Return segments that were free for the whole time, unless a thread is inside the pool."""
        if not core.lock.acquire(blocking=False):
            return
        try:
            with core.reentrancy as is_outermost:
                if is_outermost:
                    core.drain()
                    core.flush_cache()  # cached tensors are not in use either
                    try:
                        self._give_back(core.store)
                    finally:
                        core.report_segments()
        finally:
            core.lock.release()

    def _give_back(self, store: Store) -> None:
        now = time.monotonic()
        for heap in store.heaps.values():
            for segment in list(heap.segments):
                block = segment.first
                if not block.is_free or block.size < segment.size:
                    continue
                if segment.idle_since is None:
                    segment.idle_since = now
                elif now - segment.idle_since >= self._seconds:
                    heap.release_segment(block)

    def _run(self) -> None:
        period = min(self._seconds / _CHECKS, threading.TIMEOUT_MAX)
        try:
            while True:
                try:
                    self._end.get(timeout=period)
                    return
                except queue.Empty:
                    core = self._core()
                if core is None:
                    return
                self.check(core)
                del core  # so that it may be freed before the next check
        finally:
            _decays.discard(self)


_decays: set[Decay] = set()
"""all decays whose threads run."""


@atexit.register
def _end_all() -> None:
    """End all threads, so that none runs in the driver while the interpreter exits."""
    decays = list(_decays)
    for decay in decays:
        decay.stop()
    for decay in decays:
        decay.join()


os.register_at_fork(after_in_child=_decays.clear)
