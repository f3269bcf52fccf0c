"""Replays of a trace, on a pool or on the rules of one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from allocator.exchange.memory import Memory
from allocator.pool.blocks import GRAIN, Rules
from allocator.pool.driver import HUGE_PAGE, Driver
from allocator.pool.sizes import check_bool
from allocator.pool.source import Source
from allocator.pool.store import Store
from allocator.runtime.libraries import load_dpctl

if TYPE_CHECKING:
    from allocator.monitoring.trace import Trace


class Replay(NamedTuple):
    """The cost of a trace on a pool."""

    peak_requested: int
    """Most bytes requested at once: no pool needs less."""
    peak_live: int
    """Most bytes of blocks in use at once."""
    peak_reserved: int
    """Most bytes held of the driver's memory."""
    allocations: int
    """Number of allocations."""
    hits: int
    """Allocations that did not need the driver."""
    driver_calls: int
    """Segments taken from the driver and returned to it."""
    seconds: float
    """Duration, the only figure that varies between replays."""

    @property
    def ratio(self) -> float:
        """Peak of the reserved bytes, divided by that of the bytes in use."""
        return self.peak_reserved / self.peak_live if self.peak_live else 1.0

    @property
    def hit_rate(self) -> float:
        """Share of the allocations that were hits."""
        return self.hits / self.allocations if self.allocations else 1.0


def replay(trace: Trace, target: Any = None, *, touch: bool = False) -> Replay:
    """Repeat the allocations and releases of a trace, from one thread and without pauses.

    Memory that the trace never frees is released at the end. Each stream other than 0 gets its own
    queue. Failed allocations are left out; alignments are not part of a trace.

    Args:
        trace: events to repeat.
        target: a :class:`Pool` that nothing else uses meanwhile; the figures include memory that it
            held before. Or :class:`Rules`, to simulate a pool without device or memory. The default
            rules if None.
        touch: write to all memory, as programs do; for pools only.

    Raises:
        TypeError: ``touch`` is not a bool.
        ValueError: ``touch`` is True, but the target is rules, which have no memory.
        OutOfMemoryError: the pool has no room; all memory of the replay is released.

    Example:
        >>> import allocator
        >>> pool = allocator.Pool("cpu")
        >>> with pool.record() as trace:
        ...     for size in (1000, 2000, 3000):
        ...         memory = pool.allocate(size)
        >>> figures = allocator.replay(trace, allocator.Rules())
        >>> figures.peak_requested, figures.peak_reserved, figures.hits, figures.driver_calls
        (5000, 2097152, 2, 1)
        >>> figures._replace(seconds=0) == trace.replay(allocator.Pool("cpu"))._replace(seconds=0)
        True
    """
    check_bool(touch, "touch")
    if target is None or isinstance(target, Rules):
        if touch:
            raise ValueError("touch=True needs memory, and rules have none; give a pool")
        return _replayed(trace, _Simulation(target or Rules()))
    return _replayed(trace, _OnPool(target, touch))


def _replayed(trace: Trace, target: _Simulation | _OnPool) -> Replay:
    blocks: dict[int, tuple[int, Callable[[], None]]] = {}
    live = peak_live = peak_reserved = allocations = 0
    hits, driver_calls = target.counts()
    start = time.perf_counter()
    try:
        for _, _, action, pointer, size, stream in trace[:]:  # a copy: it may record this replay
            if not size:
                continue
            if action == "allocate":
                blocks[pointer] = target.allocate(size, stream)
                live += blocks[pointer][0]
                allocations += 1
                peak_live = max(peak_live, live)
                peak_reserved = max(peak_reserved, target.reserved)
            elif action == "free":
                nbytes, free = blocks.pop(pointer)
                live -= nbytes
                free()
        seconds = time.perf_counter() - start
        hits_after, driver_calls_after = target.counts()
    finally:
        for _, free in blocks.values():
            free()
    return Replay(
        trace.peak_requested,
        peak_live,
        peak_reserved,
        allocations,
        hits_after - hits,
        driver_calls_after - driver_calls,
        seconds,
    )


class _Simulation:
    """A pool's heaps over addresses without memory."""

    def __init__(self, rules: Rules) -> None:
        driver = cast(Driver, _Addresses())  # a source uses nothing else of it
        self._store = Store(Source(driver, None), rules)
        self._queues: dict[int, Any] = {0: None}

    @property
    def reserved(self) -> int:
        return self._store.source.reserved

    def counts(self) -> tuple[int, int]:
        """Hits and driver calls so far."""
        heaps = self._store.heaps.values()
        return sum(heap.hits for heap in heaps), sum(heap.upstream_calls for heap in heaps)

    def allocate(self, nbytes: int, stream: int) -> tuple[int, Callable[[], None]]:
        """The size of a new block, and the function that frees it."""
        heap = self._store.heap_of(self._queues.setdefault(stream, _IdleQueue()))
        block = heap.allocate(self._store.room_for(nbytes, GRAIN))
        return block.size, partial(heap.free, block)


class _IdleQueue:
    """A queue without work."""

    def wait(self) -> None:
        """Return at once."""


class _Addresses:
    """Addresses without memory, in place of a driver's."""

    def __init__(self) -> None:
        self._next = HUGE_PAGE

    def allocate(self, nbytes: int) -> tuple[int, None]:
        address = self._next
        self._next += -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        return address, None

    def release(self, handle: None) -> None:
        pass


class _OnPool:
    """A pool, to all of whose memory it writes if ``touch`` is True."""

    def __init__(self, pool: Any, touch: bool) -> None:
        self._pool = pool
        self._touch = touch
        self._counters = pool.tally()
        self._queues: dict[int, Any] = {0: None}

    @property
    def reserved(self) -> int:
        return int(self._counters.levels["reserved_bytes"][0].current)

    def counts(self) -> tuple[int, int]:
        segments = self._counters.levels["segment"][0]
        hits = self._counters.levels["allocation"][0].allocated - self._counters.misses
        return hits, segments.allocated + segments.freed

    def allocate(self, nbytes: int, stream: int) -> tuple[int, Callable[[], None]]:
        if stream not in self._queues:
            own = self._pool.sycl_queue
            self._queues[stream] = load_dpctl().SyclQueue(own.sycl_context, own.sycl_device)
        memory: Memory = self._pool.allocate(nbytes, queue=self._queues[stream])
        if self._touch and self._pool.is_host_accessible:
            ctypes.memset(memory.address, 1, nbytes)
        elif self._touch:
            memory.copy_from_host(bytes(nbytes))
        assert memory.allocation is not None
        return memory.allocation.size, memory.release
