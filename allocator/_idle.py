"""Gives a pool's free memory back to the driver when it was not needed for some time."""

from __future__ import annotations

import atexit
import math
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from allocator._blocks import Segment
    from allocator._pool import Pool

_LOOKS = 4
"""How often it looks in the time that memory may stay: it stays at most 1/4 longer."""


def checked_seconds(seconds: Any) -> float:
    """The time that free memory may stay.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive and finite.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"idle_seconds={seconds!r} is no number of seconds; None keeps free memory")
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"idle_seconds={seconds!r} is not positive and finite; None keeps free memory"
        )
    return float(seconds)


class Decay:
    """A thread that looks at a pool from time to time, and does not keep it alive."""

    def __init__(self, pool: Pool, seconds: float) -> None:
        self._seconds = seconds
        self._free_since: dict[Segment, float] = {}
        # A SimpleQueue may be put to at any moment, as by a weak reference's callback in the
        # middle of its own get(); an Event would wait for itself.
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        end = self._end
        self._pool = weakref.ref(pool, lambda _: end.put(None))
        self._thread: threading.Thread | None = None
        pool._store.touched = set()
        _decays.add(self)
        self.start()

    def start(self) -> None:
        """Look from now on, if it does not already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="idle decay", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Wait until the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._end.put(None)
            thread.join()

    def stop(self) -> None:
        """End the thread; it starts no more."""
        _decays.discard(self)
        self._end.put(None)

    def look(self, pool: Pool) -> None:
        """Give back what has been free since long; nothing while another thread is in the pool."""
        if not pool._lock.acquire(blocking=False):
            return
        try:
            with pool._section as is_outermost:
                if is_outermost:
                    pool._drain()
                    pool._flush_shelves()  # what is on them is not needed either
                    try:
                        self._give_back(pool)
                    finally:
                        pool._tell_of_segments()
        finally:
            pool._lock.release()

    def _give_back(self, pool: Pool) -> None:
        store, now = pool._store, time.monotonic()
        touched: set[Segment] = store.touched or set()
        store.touched = set()
        before, self._free_since = self._free_since, {}
        for heap in store.heaps.values():
            for segment in list(heap.segments):
                block = segment.first
                if not block.is_free or block.size < segment.size:
                    continue
                since = now if segment in touched else before.get(segment, now)
                if now - since >= self._seconds:
                    heap._give_back(block)
                else:
                    self._free_since[segment] = since

    def _run(self) -> None:
        period = min(self._seconds / _LOOKS, threading.TIMEOUT_MAX)
        while True:
            try:
                self._end.get(timeout=period)
            except queue.Empty:
                pool = self._pool()
                if pool is None:
                    break
                self.look(pool)
                del pool  # so that it may die before the next look
            else:
                break
        if self._pool() is None:
            _decays.discard(self)


_decays: set[Decay] = set()


@atexit.register
def _pause_all() -> None:
    """Nothing runs while the process forks or ends, so no lock is held."""
    for decay in list(_decays):
        decay.pause()


def _start_all() -> None:
    for decay in list(_decays):
        decay.start()


os.register_at_fork(before=_pause_all, after_in_parent=_start_all, after_in_child=_decays.clear)
