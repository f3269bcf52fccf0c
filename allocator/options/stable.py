"""Stable addresses: one arena in which the same calls get the same offsets in every process."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from allocator.pool.allocation import Allocation
from allocator.pool.blocks import GRAIN, LARGEST_ALIGNMENT, Block, Heap, Rules, Upstream
from allocator.pool.errors import OutOfMemoryError
from allocator.pool.sizes import parse_size
from allocator.pool.source import Source
from allocator.pool.store import Store
from allocator.runtime.formatting import size_text

_ARENA_GRAIN = LARGEST_ALIGNMENT
"""The arena starts and ends at a multiple of this, so that offsets determine alignments."""

_ONE_SEGMENT: dict[str, Any] = {
    "small_limit": 0,  # for all sizes
    "over_reserve": 0.0,  # no larger than asked for
    "slack": 0,
    "replace_limit": sys.maxsize,  # free segments are never replaced
}


class _Arena(Heap):
    """A heap of one segment, allocated at once."""

    def __init__(self, upstream: Upstream, rules: Rules, nbytes: int) -> None:
        super().__init__(upstream, rules)
        self.nbytes = nbytes
        self.free(super().allocate(nbytes))  # this block is the whole segment
        self.misses = self.peak_live = 0
        (segment,) = self.segments
        self.address = segment.address

    def allocate(self, nbytes: int, alignment: int = GRAIN) -> Block:
        if not self.fits(nbytes, alignment):
            raise MemoryError(
                f"the arena of {size_text(self.nbytes)} is exhausted, and a pool with stable "
                "addresses allocates only from its arena; make it larger with stable_addresses"
            )
        return super().allocate(nbytes, alignment)


class StableStore(Store):
    """The block records of a pool that holds one arena until it is closed.

    Offsets depend only on the order of allocations and releases: no allocation needs the driver,
    and no release depends on a queue's progress.
    """

    def __init__(self, source: Source, rules: Rules, size: int | str, pool: str) -> None:
        """Allocate the arena, or raise ValueError, OutOfMemoryError or RuntimeError."""
        if source.limit is not None:
            raise ValueError(
                f"stable_addresses={size!r} is a limit itself; leave limit and fraction out"
            )
        super().__init__(source, replace(rules, **_ONE_SEGMENT))
        nbytes = parse_size(size, "stable_addresses")
        if nbytes == 0:
            raise ValueError(
                f"stable_addresses={size!r} is too small for an arena; give its size, or None "
                "for a pool that grows"
            )
        nbytes = -(-nbytes // _ARENA_GRAIN) * _ARENA_GRAIN
        try:
            self._arena = _Arena(source, self.rules, nbytes)
        except MemoryError as error:
            raise OutOfMemoryError(
                nbytes,
                pool=pool,
                live=0,
                reserved=0,
                limit=None,
                largest_free=0,
                reason=f"stable_addresses={size!r}: {error}",
            ) from None
        address = self._arena.address
        if address % _ARENA_GRAIN:
            self._arena.trim()
            raise RuntimeError(
                f"{pool}: the driver's memory at {address:#x} is not aligned to "
                f"{size_text(_ARENA_GRAIN)}, so offsets would not be stable; stable_addresses "
                "needs a driver that aligns large memory"
            )
        self.heaps[None] = self._arena
        self.origin = address
        self.changed_segments()  # counts it

    def take(self, pool: Any, nbytes: int, alignment: int, queue: Any) -> Allocation:
        """Allocate a block, without a staggered start if that does not fit."""
        if self.fits(nbytes, alignment, queue):
            return super().take(pool, nbytes, alignment, queue)
        heap = self.heap_of(queue)
        block = heap.allocate(self.bare_room_for(nbytes, alignment), alignment)
        return self.adopt(pool, block, block.address, nbytes, alignment, heap)

    def take_alone(self, pool: Any, nbytes: int, alignment: int, queue: Any) -> Allocation:
        """Refuse: there is no memory outside of the arena."""
        raise MemoryError(
            "a finalizer or a signal handler allocated in the middle of the pool's own work, and a "
            "pool with stable addresses allocates only from its arena"
        )

    def take_back(self, allocation: Allocation) -> None:
        """End an allocation and free its block."""
        while allocation.queues:
            allocation.queues.pop().wait()
        super().take_back(allocation)

    def trim(self, target: int) -> None:
        """Keep the arena, until the pool is closed."""
        if self.is_closed:
            super().trim(target)

    def heap_of(self, queue: Any) -> Heap:
        """The arena; ValueError if the queue is not the pool's own."""
        if queue is not None:
            raise ValueError(
                f"queue={queue!r}: a pool with stable addresses serves its own queue alone; use "
                "another pool, or record_queue()"
            )
        return self._arena
