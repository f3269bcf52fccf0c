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
    from allocator.pool.pool import Pool
    from allocator.pool.store import Store

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
        # A SimpleQueue may be put to at any moment, as by a weak reference's callback in the
        # middle of its own get(); an Event would wait for itself.
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        end = self._end
        self._pool = weakref.ref(pool, lambda _: end.put(None))
        self._thread = threading.Thread(target=self._run, name="idle decay", daemon=True)
        _decays.add(self)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, soon."""
        self._end.put(None)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join()

    def look(self, pool: Pool) -> None:
        """Give back what has been free for long; nothing while another thread is in the pool."""
        if not pool._lock.acquire(blocking=False):
            return
        try:
            with pool._section as is_outermost:
                if is_outermost:
                    pool._drain()
                    pool._flush_shelves()  # what is on them is not needed either
                    try:
                        self._give_back(pool._store)
                    finally:
                        pool._tell_of_segments()
        finally:
            pool._lock.release()

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
                    heap.give_back(block)

    def _run(self) -> None:
        period = min(self._seconds / _LOOKS, threading.TIMEOUT_MAX)
        try:
            while True:
                try:
                    self._end.get(timeout=period)
                    return
                except queue.Empty:
                    pool = self._pool()
                if pool is None:
                    return
                self.look(pool)
                del pool  # so that it may die before the next look
        finally:
            _decays.discard(self)


_decays: set[Decay] = set()
"""whose threads run."""


@atexit.register
def _end_all() -> None:
    """Nothing may run in the driver while the interpreter ends."""
    decays = list(_decays)
    for decay in decays:
        decay.stop()
    for decay in decays:
        decay.join()


os.register_at_fork(after_in_child=_decays.clear)
