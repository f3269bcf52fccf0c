"""The books of a pool: what is free, what is in use, and what the driver gave.

One thread at a time; the pool sees to that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from allocator.pool.allocation import Allocation
from allocator.pool.blocks import GRAIN, Block, Heap, Rules, Segment
from allocator.pool.source import Source
from allocator.runtime.libraries import load_dpctl
from allocator.watching.statistics import Split, Tally

if TYPE_CHECKING:
    from allocator.pool.pool import Pool

_PAGE = 4096
ROUNDING = GRAIN
STAGGERED = 1 << 20
"""Allocations above it start at different offsets within their pages."""


def rounded(nbytes: int) -> int:
    """Bytes of the block of a request."""
    return -(-nbytes // ROUNDING) * ROUNDING


class Store:
    """Heaps of blocks, one for each queue, over one source of segments."""

    def __init__(self, source: Source, rules: Rules) -> None:
        self.source = source
        self.rules = rules
        self.heaps: dict[Any, Heap] = {None: Heap(source, rules)}
        """by queue; None, the first, is the pool's own."""
        self.tally = Tally()
        """the counters."""
        self.in_use: dict[int, Allocation] = {}
        """by address."""
        self.holders: set[Allocation] = set()
        """those of open reservations."""
        self.margin = 0
        """bytes before and behind each allocation that are nobody's, a multiple of 512."""
        self.leaving: Callable[[Allocation], Iterable[Allocation]] = _alone
        """What becomes free when an allocation is over: itself, or nothing if it is kept."""
        self.is_closed = False
        """whether nothing is to be kept for later."""
        self._awaiting: list[tuple[Allocation, list[Any]]] = []
        self._staggered = 0
        self._segments: dict[tuple[Any, int], Segment] = {}
        self._calls = 0

    def room_for(self, nbytes: int, alignment: int) -> int:
        """Bytes that the block of a request has."""
        # A kernel that reads one array and writes another is slow if both lie at one address
        # modulo a page, so large ones start at different offsets. All get the same room, so that
        # the blocks stay interchangeable.
        stagger = _PAGE - ROUNDING if _is_staggered(nbytes, alignment) else 0
        return self.bare_room_for(nbytes, alignment) + stagger

    def bare_room_for(self, nbytes: int, alignment: int) -> int:
        """The same for an allocation that starts where its block does, but for the margin."""
        return self._front(alignment) + nbytes + self.margin

    def fits(self, nbytes: int, alignment: int, queue: Any) -> bool:
        """Whether a free block is large enough."""
        return self._heap_of(queue).fits(self.room_for(nbytes, alignment), alignment)

    def take(self, pool: Pool, nbytes: int, alignment: int, queue: Any) -> Allocation:
        """A block.

        Raises:
            MemoryError: there is none, and the source gives no more.
        """
        heap = self._heap_of(queue)
        misses = heap.misses
        block = heap.allocate(self.room_for(nbytes, alignment), alignment)
        self.tally.misses += heap.misses - misses
        stagger = self._next_stagger() if _is_staggered(nbytes, alignment) else 0
        return self.adopt(pool, block, block.address + stagger, nbytes, alignment, heap)

    def adopt(
        self, pool: Pool, block: Block, start: int, nbytes: int, alignment: int, heap: Heap
    ) -> Allocation:
        """An allocation from ``start`` on, but for the margin, in a block of the heap."""
        allocation = Allocation(pool, start + self._front(alignment), nbytes)
        allocation.heap, allocation.block = heap, block
        block.tag = allocation
        self.in_use[allocation.address] = allocation
        self.tally.gave(block.size, nbytes, block.segment.is_small)
        block.segment.idle_since = None
        return allocation

    def hold(self, holder: Allocation) -> None:
        """Find a block for ``holder``, which is in none of the counters.

        Raises:
            MemoryError: there is none, and the source gives no more.
        """
        heap = self._heap_of(None)
        self.holders.add(holder)
        block = heap.allocate(holder.nbytes)
        holder.heap, holder.block, holder.address = heap, block, block.address
        block.tag = holder
        block.segment.idle_since = None

    def take_alone(self, pool: Pool, nbytes: int, alignment: int) -> Allocation:
        """Memory from the source for itself, touching none of the books that are being changed."""
        room = rounded(nbytes + alignment + 2 * self.margin)
        address, handle = self.source.allocate(room)
        start = -(-(address + self.margin) // alignment) * alignment
        allocation = Allocation(pool, start, nbytes)
        allocation.handle = handle
        self.in_use[allocation.address] = allocation
        self.tally.misses += 1
        self.tally.grew(room, False)
        self.tally.gave(allocation.size, nbytes, False)
        return allocation

    # What follows may be done again after an interrupt, whatever was done before it.

    def take_back(self, allocation: Allocation) -> None:
        """The allocation is over; its block is free once no other queue uses it."""
        if allocation.pool is None:  # it was on its way to a shelf
            self.free_shelved(allocation)
        elif self.in_use.get(allocation.address) is allocation:
            if allocation.queues:
                # First: without the barriers, or in no book for a moment, it would be given again
                # while a queue uses it.
                events = [queue.submit_barrier() for queue in allocation.queues]
                self._awaiting.append((allocation, events))
            self._strike(allocation)
            self.tally.got_back(allocation.size, allocation.nbytes, allocation.is_small)
            if not allocation.queues:
                self.make_free(self.leaving(allocation))

    def make_free(self, allocations: Iterable[Allocation]) -> None:
        """Make the blocks free of allocations that are over."""
        for allocation in allocations:
            self._make_free(allocation)

    def take_back_finished(self) -> None:
        """Make free what other queues are done with."""
        for waiting in list(self._awaiting):
            allocation, events = waiting
            if all(_is_complete(event) for event in events):
                self._awaiting.remove(waiting)
                self._make_free(allocation)

    def shelve(self, allocation: Allocation) -> None:
        """Count the allocation as free, while its block stays as it is."""
        allocation.pool = None  # which may die with tensors on its shelves
        self._count_as_free(allocation)

    def unshelve(self, pool: Pool, allocation: Allocation) -> None:
        """Count it as in use again."""
        allocation.pool = pool
        self.in_use[allocation.address] = allocation
        self.tally.gave(allocation.size, allocation.nbytes, allocation.is_small)

    def free_shelved(self, allocation: Allocation) -> None:
        """Make the block of a shelved allocation free."""
        self._count_as_free(allocation)  # if it was interrupted on its way to the shelf
        self._free_block(allocation)

    def trim(self, target: int) -> int:
        """Give free segments back until the source holds at most ``target`` bytes."""
        given_back = 0
        for heap in self.heaps.values():
            given_back += heap.trim(max(target - (self.source.reserved - heap.reserved), 0))
        return given_back

    def changed_segments(self) -> tuple[list[Segment], list[Segment]]:
        """The segments that went and that came since the last call, counted."""
        calls = sum(heap.upstream_calls for heap in self.heaps.values())
        if calls == self._calls:
            return [], []
        self._calls = calls
        before, now = self._segments, self._segments_now()
        self._segments = now
        gone = [before[key] for key in before if key not in now]
        come = [now[key] for key in now if key not in before]
        for segment in gone:
            self.tally.shrank(segment.size, segment.is_small)
        for segment in come:
            self.tally.grew(segment.size, segment.is_small)
        return gone, come

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

    @property
    def fragmentation(self) -> float:
        """1 - the largest free block's part of all free bytes; 0 where nothing is free."""
        free = self.free_bytes
        return 1 - self.largest_free / free if free else 0.0

    def recover(self, kept: Collection[int], quarantined: Collection[Allocation] = ()) -> None:
        """After an exception from outside between two instructions: keep what is certain.

        Args:
            kept: the ids of allocations that may be over but keep their blocks.
            quarantined: those that are over, and whose blocks cannot be given yet.
        """
        for awaited, _ in self._awaiting:
            self._strike(awaited)
        kept = {*kept, *map(id, quarantined), *map(id, self.holders)}
        for heap in self.heaps.values():
            heap.repair()
            for block in list(heap.blocks()):
                if not block.is_free and self._is_lost(block.tag, kept):
                    heap.free(block)
        # A segment on its way from or to the driver when the exception came is nobody's now.
        given = list(self.in_use.values())
        active = [*given, *(awaited for awaited, _ in self._awaiting), *quarantined]
        alone = [allocation.handle[1] for allocation in active if allocation.block is None]
        self.source.reserved = sum(alone) + sum(heap.reserved for heap in self.heaps.values())
        self._segments = self._segments_now()
        room = {False: Split(len(alone), sum(alone)), True: Split(0, 0)}
        for segment in self._segments.values():
            blocks, nbytes = room[segment.is_small]
            room[segment.is_small] = Split(blocks + 1, nbytes + segment.size)
        self.tally.recount(given, active, room)

    def at(self, address: int) -> Allocation | None:
        """The allocation in use that an address lies in."""
        allocation = self.in_use.get(address)
        if allocation is not None:
            return allocation
        for each in list(self.in_use.values()):
            if each.address <= address < each.address + each.nbytes:
                return each
        return None

    def unclaimed(self) -> list[Allocation]:
        """Those in use that nobody has: an exception from outside came before a caller had them."""
        return [
            allocation
            for allocation, count in _referenced(self.in_use)
            if count == _ONCE + (allocation.block is not None)  # of which it is the tag
        ]

    def _is_lost(self, allocation: Allocation | None, kept: Collection[int]) -> bool:
        """Whether a block never reached the caller, or was on its way back."""
        if allocation is None:
            return True
        is_awaited = any(allocation is awaited for awaited, _ in self._awaiting)
        is_in_use = self.in_use.get(allocation.address) is allocation
        return not (is_in_use or is_awaited or id(allocation) in kept)

    def _strike(self, allocation: Allocation) -> bool:
        """It is in use no more; whether it was, and its place not another one's by now."""
        was_in_use = self.in_use.get(allocation.address) is allocation
        if was_in_use:
            del self.in_use[allocation.address]
        return was_in_use

    def _count_as_free(self, allocation: Allocation) -> None:
        if self._strike(allocation):
            size, is_small = allocation.size, allocation.is_small
            self.tally.got_back(size, allocation.nbytes, is_small)
            self.tally.is_free(size, is_small)

    def _heap_of(self, queue: Any) -> Heap:
        if queue not in self.heaps:
            self.heaps[queue] = Heap(self.source, self.rules)
        return self.heaps[queue]

    def _front(self, alignment: int) -> int:
        """Bytes of the margin before an allocation, which keep its alignment."""
        return -(-self.margin // alignment) * alignment

    def _next_stagger(self) -> int:
        self._staggered = (self._staggered + ROUNDING) % _PAGE
        return self._staggered

    def _make_free(self, allocation: Allocation) -> None:
        self.tally.is_free(allocation.size, allocation.is_small)
        if allocation.block is not None:
            self._free_block(allocation)
            return
        _, room = allocation.handle
        self.source.release(allocation.handle)
        self.tally.shrank(room, False)

    def _free_block(self, allocation: Allocation) -> None:
        heap, block = allocation.heap, allocation.block
        if heap is not None and block is not None and block.tag is allocation:
            heap.free(block)


def _referenced(held: dict[int, Any]) -> list[tuple[Any, int]]:
    """What a dict holds, and how often each is referred to."""
    return [(value, sys.getrefcount(value)) for value in list(held.values())]


_ONCE = _referenced({0: object()})[0][1]


def _is_staggered(nbytes: int, alignment: int) -> bool:
    return nbytes > STAGGERED and alignment <= ROUNDING


def _alone(allocation: Allocation) -> tuple[Allocation, ...]:
    return (allocation,)


def _is_complete(event: Any) -> bool:
    return bool(event.execution_status == load_dpctl().event_status_type.complete)
