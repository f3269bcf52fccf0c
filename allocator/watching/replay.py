"""A trace, asked of a pool again."""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from allocator.pool.blocks import Block, Heap, Rules
from allocator.pool.source import Source
from allocator.pool.store import ROUNDING, Store
from allocator.runtime.driver import HUGE_PAGE, Driver
from allocator.runtime.libraries import load_dpctl

if TYPE_CHECKING:
    from allocator.exchange.memory import Memory
    from allocator.pool.pool import Pool
    from allocator.watching.trace import Trace


class Replay(NamedTuple):
    """What a trace cost a pool."""

    peak_requested: int
    """The most bytes in use at once, as they were asked for: no pool needs less."""
    peak_live: int
    """The same in whole blocks."""
    peak_reserved: int
    """The most bytes that the pool held of the driver's."""
    allocations: int
    """How many there were."""
    hits: int
    """Allocations of which the driver saw nothing."""
    driver_calls: int
    """Segments that the driver gave and got back."""
    seconds: float
    """The only figure that is not the same every time."""

    @property
    def ratio(self) -> float:
        """Of the peaks of what was reserved and what was live."""
        return self.peak_reserved / self.peak_live if self.peak_live else 1.0

    @property
    def hit_rate(self) -> float:
        """The part of the allocations that were hits."""
        return self.hits / self.allocations if self.allocations else 1.0


def replay(trace: Trace, target: Pool | Rules | None = None, *, touch: bool = False) -> Replay:
    """Allocate and release as a trace says, from one thread and without pauses.

    Memory that the trace never frees is released at the end. Each stream other than 0 has a queue
    of its own. Failed allocations are left out, and so are alignments, which no trace has.

    Args:
        trace: what to do.
        target: a pool that nobody else uses meanwhile, whose figures count what it held before; or
            rules, to see what such a pool would do, without device or memory. The default rules
            if None.
        touch: write to all memory, as programs do; for pools only.

    Raises:
        ValueError: rules have no memory to touch.
        OutOfMemoryError: the pool has no room; what was allocated is released.

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
    if target is None or isinstance(target, Rules):
        if touch:
            raise ValueError("touch=True needs memory, and rules have none; give a pool")
        return _replayed(trace, _Simulation(target or Rules()))
    return _replayed(trace, _TouchedPool(target) if touch else _OnPool(target))


class _Target(Protocol):
    """What a trace is replayed on."""

    store: Store
    """the pool's books."""

    def allocate(self, nbytes: int, stream: int) -> Any:
        """A block, or memory."""

    def size(self, block: Any) -> int:
        """Bytes that it takes of the pool."""

    def free(self, block: Any) -> None:
        """Take it back."""


def _replayed(trace: Trace, target: _Target) -> Replay:
    blocks: dict[int, Any] = {}
    live = peak_live = peak_reserved = allocations = 0
    hits, driver_calls = _counters(target)
    start = time.perf_counter()
    try:
        for _, _, action, pointer, size, stream in trace[:]:  # which may record this replay
            if not size:
                continue
            if action == "allocate":
                block = blocks[pointer] = target.allocate(size, stream)
                live += target.size(block)
                allocations += 1
                peak_live = max(peak_live, live)
                peak_reserved = max(peak_reserved, target.store.source.reserved)
            elif action == "free":
                block = blocks.pop(pointer)
                live -= target.size(block)
                target.free(block)
        seconds = time.perf_counter() - start
        hits_after, driver_calls_after = _counters(target)
    finally:
        for block in blocks.values():
            target.free(block)
    return Replay(
        trace.peak_requested,
        peak_live,
        peak_reserved,
        allocations,
        hits_after - hits,
        driver_calls_after - driver_calls,
        seconds,
    )


def _counters(target: _Target) -> tuple[int, int]:
    """Hits and driver calls until now."""
    heaps = target.store.heaps.values()
    return sum(heap.hits for heap in heaps), sum(heap.upstream_calls for heap in heaps)


class _Simulation:
    """A pool's heaps over addresses without memory."""

    def __init__(self, rules: Rules) -> None:
        driver = cast(Driver, _Addresses())  # a source asks nothing else of it
        self.store = Store(Source(driver, None), rules)

    def allocate(self, nbytes: int, stream: int) -> tuple[Heap, Block]:
        heap = self.store._heap_of(stream)
        return heap, heap.allocate(self.store.room_for(nbytes, ROUNDING))

    def size(self, block: tuple[Heap, Block]) -> int:
        return block[1].size

    def free(self, block: tuple[Heap, Block]) -> None:
        heap, piece = block
        heap.free(piece)


class _Addresses:
    """Gives addresses as a driver does, of memory that is not there."""

    def __init__(self) -> None:
        self._next = HUGE_PAGE

    def allocate(self, nbytes: int) -> tuple[int, None]:
        address = self._next
        self._next += -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        return address, None

    def release(self, handle: None) -> None:
        pass


class _OnPool:
    """A real pool."""

    def __init__(self, pool: Pool) -> None:
        self.store = pool._store
        self._pool = pool
        self._queues: dict[int, Any] = {0: None}

    def allocate(self, nbytes: int, stream: int) -> Memory:
        return self._pool.allocate(nbytes, queue=self._queue_of(stream))

    def size(self, memory: Memory) -> int:
        assert memory._allocation is not None
        return memory._allocation.size

    def free(self, memory: Memory) -> None:
        memory.release()

    def _queue_of(self, stream: int) -> Any:
        if stream not in self._queues:
            own = self._pool.sycl_queue
            self._queues[stream] = load_dpctl().SyclQueue(own.sycl_context, own.sycl_device)
        return self._queues[stream]


class _TouchedPool(_OnPool):
    """A real pool, all of whose memory is written to."""

    def allocate(self, nbytes: int, stream: int) -> Memory:
        memory = super().allocate(nbytes, stream)
        if self._pool.is_host_accessible:
            ctypes.memset(memory.address, 1, nbytes)
        else:
            memory.copy_from_host(bytes(nbytes))
        return memory
