"""A pool's block records: free memory, memory in use, and segments from the driver.

Used by one thread at a time, which the pool's lock ensures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from allocator.pool.allocation import Allocation
from allocator.pool.blocks import GRAIN, Block, Heap, Rules, Segment
from allocator.pool.counters import ALLOCATIONS, BLOCKS, SEGMENTS, Counters
from allocator.pool.source import QueueSource, Source
from allocator.runtime.libraries import load_dpctl

_PAGE = 4096
STAGGERED = 1 << 20
"""Allocations larger than this start at different offsets within their pages."""


def whole_grains(nbytes: int) -> int:
    """``nbytes``, rounded up to a multiple of GRAIN."""
    return -(-nbytes // GRAIN) * GRAIN


class Store:
    """Heaps of blocks, one for each queue, over one source of segments."""

    origin: int | None = None
    """the address that stable offsets are counted from; None if offsets are not stable."""

    def __init__(self, source: Source, rules: Rules) -> None:
        self.source = source
        self.rules = rules
        self.heaps: dict[Any, Heap] = {None: Heap(source, rules)}
        """the heap of each queue; the first queue, None, is the pool's own."""
        self.counters = Counters()
        self.in_use: dict[int, Allocation] = {}
        """the allocations in use, by address."""
        self.holders: set[Allocation] = set()
        """the holders of open reservations."""
        self.margin = 0
        """unused bytes before and after each allocation, a multiple of GRAIN."""
        self.leaving: Callable[[Allocation], Iterable[Allocation]] = lambda ended: (ended,)
        """the allocations to free when one ends: itself, or none if it is quarantined."""
        self.is_closed = False
        """whether the store has stopped caching."""
        self.awaiting: list[tuple[Allocation, list[Any]]] = []
        """released allocations, and the events of other queues that still use them."""
        self._stagger = 0
        self._segments: dict[tuple[Any, int], Segment] = {}
        self._calls = 0

    def heap_of(self, queue: Any) -> Heap:
        """The heap of a queue's memory."""
        if queue not in self.heaps:
            upstream = QueueSource(self.source, queue)
            self.heaps[queue] = Heap(upstream, self.rules, len(self.heaps))
        return self.heaps[queue]

    @property
    def queues(self) -> list[Any]:
        """The queue of each heap, without that of a driver that has none."""
        own = self.source.driver.queue
        queues = (own if queue is None else queue for queue in list(self.heaps))
        return [queue for queue in queues if queue is not None]

    def room_for(self, nbytes: int, alignment: int) -> int:
        """The size of the block for a request."""
        # A kernel that reads one array and writes another is slow if both have the same address
        # modulo the page size, so large allocations start at different offsets. All blocks have
        # the same room, so that they are interchangeable. See docs/design/staggered-addresses.md.
        stagger = _PAGE - GRAIN if _is_staggered(nbytes, alignment) else 0
        return self.bare_room_for(nbytes, alignment) + stagger

    def bare_room_for(self, nbytes: int, alignment: int) -> int:
        """The size of the block for a request that is not staggered."""
        return self._front(alignment) + nbytes + self.margin

    def fits(self, nbytes: int, alignment: int, queue: Any) -> bool:
        """Whether a free block is large enough."""
        return self.heap_of(queue).fits(self.room_for(nbytes, alignment), alignment)

    def take(self, pool: Any, nbytes: int, alignment: int, queue: Any) -> Allocation:
        """Allocate a block, or raise MemoryError."""
        heap = self.heap_of(queue)
        misses = heap.misses
        block = heap.allocate(self.room_for(nbytes, alignment), alignment)
        self.counters.misses += heap.misses - misses
        stagger = 0
        if _is_staggered(nbytes, alignment):
            stagger = self._stagger = (self._stagger + GRAIN) % _PAGE
        return self.adopt(pool, block, block.address + stagger, nbytes, alignment, heap)

    def adopt(
        self, pool: Any, block: Block, start: int, nbytes: int, alignment: int, heap: Heap
    ) -> Allocation:
        """An allocation in a block of the heap, behind the margin that begins at ``start``."""
        allocation = Allocation(pool, start + self._front(alignment), nbytes, self.in_use)
        allocation.heap, allocation.block = heap, block
        block.tag = allocation
        self.in_use[allocation.address] = allocation
        self.counters.allocated(block.size, nbytes, block.segment.is_small)
        block.segment.idle_since = None
        return allocation

    def hold(self, holder: Allocation) -> None:
        """Allocate a block for ``holder``, which no counter includes, or raise MemoryError."""
        heap = self.heap_of(None)
        self.holders.add(holder)
        block = heap.allocate(holder.nbytes)
        holder.heap, holder.block, holder.address = heap, block, block.address
        block.tag = holder
        block.segment.idle_since = None

    def take_alone(self, pool: Any, nbytes: int, alignment: int, queue: Any) -> Allocation:
        """Memory directly from the source, without touching the heaps, which are being changed."""
        room = whole_grains(nbytes + alignment + 2 * self.margin)
        address, handle = self.source.allocate(room)
        start = -(-(address + self.margin) // alignment) * alignment
        allocation = Allocation(pool, start, nbytes, self.in_use)
        allocation.handle = handle
        if queue is not None:
            allocation.queues.append(queue)  # no heap knows of it
        self.in_use[allocation.address] = allocation
        self.counters.misses += 1
        self.counters.grew(room, False)
        self.counters.allocated(allocation.size, nbytes, False)
        return allocation

    # The methods below may be repeated after an interrupt, wherever it stopped them.

    def take_back(self, allocation: Allocation) -> None:
        """End an allocation; its block becomes free once no other queue uses it."""
        if allocation.pool is None:  # it was being cached
            self.free_cached(allocation)
        elif self.in_use.get(allocation.address) is allocation:
            if allocation.queues:
                # First: a block without barriers, or in no record for a moment, might be allocated
                # again while a queue uses it.
                events = [queue.submit_barrier() for queue in allocation.queues]
                self.awaiting.append((allocation, events))
            self._remove_in_use(allocation)
            self.counters.released(allocation.size, allocation.nbytes, allocation.is_small)
            if not allocation.queues:
                self.make_free(self.leaving(allocation))

    def make_free(self, allocations: Iterable[Allocation]) -> None:
        """Free the blocks of ended allocations."""
        for allocation in allocations:
            self.counters.freed(allocation.size, allocation.is_small)
            if allocation.block is not None:
                self._free_block(allocation)
            else:
                self.source.release(allocation.handle)
                self.counters.shrank(allocation.handle[1], False)

    def take_back_finished(self, *, wait: bool = False) -> None:
        """Free the blocks that other queues have finished with, or wait for all of them."""
        for waiting in list(self.awaiting):
            allocation, events = waiting
            for event in events if wait else ():
                event.wait()
            complete = load_dpctl().event_status_type.complete
            if all(event.execution_status == complete for event in events):
                self.awaiting.remove(waiting)
                self.make_free((allocation,))

    def wait(self) -> None:
        """Wait for all work that may use the memory, released or not."""
        recorded = [queue for each in list(self.in_use.values()) for queue in each.queues]
        for queue in (*self.queues, *recorded):
            queue.wait()
        self.take_back_finished(wait=True)

    def cache(self, allocation: Allocation) -> None:
        """Count the allocation as free, but leave its block allocated."""
        allocation.pool = None  # which may be freed together with its cached tensors
        self._count_as_free(allocation)

    def uncache(self, pool: Any, allocation: Allocation) -> None:
        """Count a cached allocation as in use again."""
        allocation.pool = pool
        self.in_use[allocation.address] = allocation
        self.counters.allocated(allocation.size, allocation.nbytes, allocation.is_small)

    def free_cached(self, allocation: Allocation) -> None:
        """Free the block of a cached allocation."""
        self._count_as_free(allocation)  # if an interrupt stopped cache()
        self._free_block(allocation)

    def trim(self, target: int) -> None:
        """Return free segments to the driver until the source holds at most ``target`` bytes."""
        for heap in self.heaps.values():
            heap.trim(max(target - (self.source.reserved - heap.reserved), 0))

    def changed_segments(self) -> tuple[list[Segment], list[Segment]]:
        """Count and return the segments that were returned and taken since the last call."""
        calls = sum(heap.upstream_calls for heap in self.heaps.values())
        if calls == self._calls:
            return [], []
        self._calls = calls
        before, now = self._segments, self._segments_now()
        self._segments = now
        returned = [before[key] for key in before if key not in now]
        taken = [now[key] for key in now if key not in before]
        for segment in returned:
            self.counters.shrank(segment.size, segment.is_small)
        for segment in taken:
            self.counters.grew(segment.size, segment.is_small)
        return returned, taken

    def _segments_now(self) -> dict[tuple[Any, int], Segment]:
        return {
            (queue, segment.ordinal): segment
            for queue, heap in self.heaps.items()
            for segment in heap.segments
        }

    @property
    def free_bytes(self) -> int:
        """Bytes of free blocks."""
        return sum(heap.reserved - heap.live for heap in self.heaps.values())

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block."""
        return max((heap.largest_free for heap in self.heaps.values()), default=0)

    def recover(self, exported: Collection[int], quarantined: Collection[Allocation]) -> None:
        """Restore consistent records after an asynchronous exception.

        Allocations whose ids are ``exported`` keep their blocks although they may have ended, and
        so do those in quarantine.
        """
        for awaited, _ in self.awaiting:
            self._remove_in_use(awaited)
        kept = {*exported, *map(id, quarantined), *map(id, self.holders)}
        for heap in self.heaps.values():
            heap.repair()
            for block in list(heap.blocks()):
                if not block.is_free and self._is_lost(block.tag, kept):
                    heap.free(block)
        # A segment that was on its way from or to the driver is not held any more.
        in_use = list(self.in_use.values())
        active = [*in_use, *(awaited for awaited, _ in self.awaiting), *quarantined]
        alone = [allocation.handle[1] for allocation in active if allocation.block is None]
        self.source.reserved = sum(alone) + sum(heap.reserved for heap in self.heaps.values())
        self._segments = self._segments_now()
        segments = [(each.size, each.is_small) for each in self._segments.values()]
        segments += [(nbytes, False) for nbytes in alone]
        recount = self.counters.recount
        recount(ALLOCATIONS, [((1, each.size, each.nbytes), each.is_small) for each in in_use])
        recount(BLOCKS, [((1, each.size), each.is_small) for each in active])
        recount(SEGMENTS, [((1, size), is_small) for size, is_small in segments])

    def at(self, address: int) -> Allocation | None:
        """The allocation in use that contains an address."""
        allocation = self.in_use.get(address)
        if allocation is not None:
            return allocation
        for each in list(self.in_use.values()):
            if each.address <= address < each.address + each.nbytes:
                return each
        return None

    def unclaimed(self) -> list[Allocation]:
        """Allocations that never reached a caller, because of an asynchronous exception."""
        return [
            allocation
            for allocation, count in _referenced(self.in_use)
            if count == _ONCE + (allocation.block is not None)  # the block's tag
        ]

    def _is_lost(self, allocation: Allocation | None, kept: Collection[int]) -> bool:
        """Whether a block never reached its caller, or was being released."""
        if allocation is None:
            return True
        is_awaited = any(allocation is awaited for awaited, _ in self.awaiting)
        return not (allocation.is_in_use or is_awaited or id(allocation) in kept)

    def _remove_in_use(self, allocation: Allocation) -> bool:
        """Remove an allocation from those in use; False if it was not there."""
        if self.in_use.get(allocation.address) is not allocation:
            return False
        del self.in_use[allocation.address]
        return True

    def _count_as_free(self, allocation: Allocation) -> None:
        if self._remove_in_use(allocation):
            size, is_small = allocation.size, allocation.is_small
            self.counters.released(size, allocation.nbytes, is_small)
            self.counters.freed(size, is_small)

    def _front(self, alignment: int) -> int:
        """Bytes of the margin before an allocation, which keep its alignment."""
        return -(-self.margin // alignment) * alignment

    def _free_block(self, allocation: Allocation) -> None:
        heap, block = allocation.heap, allocation.block
        if heap is not None and block is not None and block.tag is allocation:
            heap.free(block)


def _referenced(held: dict[int, Any]) -> list[tuple[Any, int]]:
    """The values of a dict, and how often each is referred to."""
    return [(value, sys.getrefcount(value)) for value in list(held.values())]


_ONCE = _referenced({0: object()})[0][1]


def _is_staggered(nbytes: int, alignment: int) -> bool:
    return nbytes > STAGGERED and alignment <= GRAIN
