"""Heaps: where a pool places blocks in its segments. Pure arithmetic, without device or lock.

A heap takes segments from upstream and splits them into blocks. The policy:

- Sizes are rounded up to 512 bytes. Small requests have segments of their own, so that a small
  block never keeps a large segment from being returned.
- Best fit: a free block of exactly the size, else the smallest that is large enough. Among equal
  blocks it takes the one in the oldest segment at the lowest offset. Addresses are not compared, so
  the same calls give the same offsets in every process. The remainder is split off, and free
  neighbors are merged at once. A wholly free segment is split only if nothing else fits.
- Bounded over-reserve: a heap that must grow first returns its wholly free segments, and then takes
  one segment as large as the bound allows. The bound is 3% and 8 MiB above the peak of live bytes;
  only fragmentation can keep a heap above it.

An asynchronous exception, such as KeyboardInterrupt, may arrive at any instruction. Therefore the
chains are authoritative: the heap's segments, ``segment.first``, ``block.next``, ``block.address``
and ``block.is_free``. A change takes effect by a single store into them, and ``Heap.repair``
derives everything else from them.

For the figures behind the constants see docs/design/bounded-over-reserve.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from allocator.pool.sizes import as_number

_KIB = 1024
_MIB = 1024 * _KIB
GRAIN = 512
"""Segments start at a multiple of this, whatever the rounding of their blocks."""
LARGEST_ALIGNMENT = 2 * _MIB
"""The largest alignment that a request may ask for."""


class Upstream(Protocol):
    """A source of segments."""

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of new memory, a multiple of 512, and a handle that keeps it.

        A handle that is dropped, as by an asynchronous exception, returns the memory too.

        Raises:
            MemoryError: there is not enough.
        """

    def release(self, handle: Any) -> None:
        """Return the memory of a handle."""


@dataclass(frozen=True)
class Rules:
    """Constants of the allocation policy, in bytes unless stated otherwise.

    Raises:
        TypeError: a field is not a number.
        ValueError: a field is out of range, or small requests do not fit into their segments.

    Example:
        >>> from allocator import Pool
        >>> pool = Pool("cpu", rules=Rules(slack=0))
        >>> x = pool.empty(1000)
        >>> pool.memory_reserved()
        2097152
    """

    rounding: int = 512
    """Block sizes are multiples of it: a power of two from 512 to 2 MiB."""
    small_limit: int = 64 * _KIB
    """Largest small request; at most ``small_segment``."""
    small_segment: int = 2 * _MIB
    """Size of the segments that small requests share, a multiple of ``rounding``."""
    over_reserve: float = 0.03
    """Share of the peak of live bytes that a growing heap may hold beyond it."""
    slack: int = 8 * _MIB
    """Bytes that it may hold in addition."""
    replace_limit: int = 16 * _MIB
    """Smallest request that may replace a free segment: if the heap is beyond its bound, the
    segment is returned for one of the request's size instead of being split."""
    replace_rest: float = 0.25
    """Largest remainder, as a share of the request, for which the segment is split all the same."""

    def __post_init__(self) -> None:
        for name in ("rounding", "small_limit", "small_segment", "slack", "replace_limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r} is not an integer")
            if value < 0:
                raise ValueError(f"{name}={value!r} is negative; give 0 or more")
        for name in ("over_reserve", "replace_rest"):
            if not 0 <= as_number(getattr(self, name), name) < math.inf:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not a finite number of at least 0"
                )
        rounding, segment, limit = self.rounding, self.small_segment, self.small_limit
        if not GRAIN <= rounding <= LARGEST_ALIGNMENT or rounding & (rounding - 1):
            raise ValueError(
                f"rounding={rounding} is not a power of two of at least {GRAIN} and at most "
                f"{LARGEST_ALIGNMENT}"
            )
        if segment == 0 or segment % rounding:
            raise ValueError(
                f"small_segment={segment} is not a positive multiple of rounding={rounding}"
            )
        if limit > segment:
            raise ValueError(
                f"small_limit={limit} does not fit into segments of small_segment={segment}; give "
                "a small_limit of at most small_segment"
            )


class Segment:
    """Memory from upstream, divided into a chain of blocks."""

    __slots__ = ("address", "first", "handle", "idle_since", "is_small", "ordinal", "size")

    def __init__(self, address: int, size: int, handle: Any, ordinal: int, is_small: bool) -> None:
        self.address = address
        self.size = size
        self.handle = handle
        self.ordinal = ordinal
        """Number in order of creation."""
        self.is_small = is_small
        self.idle_since: float | None = None
        """Time at which the owner first found it free; None while blocks of it are in use."""
        self.first = Block(self, address, size)

    def blocks(self) -> Iterator[Block]:
        """The blocks, by offset."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next


class Block:
    """A piece of a segment, free or allocated."""

    __slots__ = ("address", "is_free", "next", "previous", "requested", "segment", "size", "tag")

    def __init__(self, segment: Segment, address: int, size: int) -> None:
        self.segment = segment
        self.address = address
        self.size = size
        """Bytes, rounded."""
        self.requested = 0
        """Bytes asked for; 0 while free."""
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_free = True
        self.tag: Any = None
        """The owner's mark while the block is allocated."""


def split(block: Block, size: int) -> Block:
    """Shrink a block to this size; returns the rest as a block, free if the given one is free.

    An interrupt before the store into ``block.next`` leaves everything unchanged; after it,
    :meth:`Heap.repair` finds both blocks.
    """
    rest = Block(block.segment, block.address + size, block.size - size)
    rest.is_free = block.is_free
    rest.previous = block
    following = rest.next = block.next
    block.next = rest
    block.size = size
    if following is not None:
        following.previous = rest
    return rest


class _FreeBlocks:
    """Free blocks, in a bin for each size: one sorted list would be slower for many blocks."""

    def __init__(self) -> None:
        self._bins: dict[int, list[tuple[int, int, Block]]] = {}
        """The bins by size; each is in order of segments and offsets."""
        self._sizes: list[int] = []
        """Sizes of the bins, ascending."""

    def __iter__(self) -> Iterator[Block]:
        for entries in self._bins.values():
            for _, _, block in entries:
                yield block

    def add(self, block: Block) -> None:
        entry = block.segment.ordinal, block.address, block
        entries = self._bins.get(block.size)
        if entries is None:
            self._bins[block.size] = [entry]
            insort(self._sizes, block.size)
        else:
            insort(entries, entry)

    def remove(self, block: Block) -> None:
        entries = self._bins[block.size]
        if len(entries) == 1:
            del self._bins[block.size]
            del self._sizes[bisect_left(self._sizes, block.size)]
        else:
            del entries[bisect_left(entries, (block.segment.ordinal, block.address))]

    def best_fit(self, size: int, alignment: int) -> Block | None:
        """The first block that is large enough at this alignment."""
        entries = self._bins.get(size)
        if entries is not None and entries[0][1] % alignment == 0:
            return entries[0][2]
        sizes = self._sizes
        for index in range(bisect_left(sizes, size), len(sizes)):
            for _, address, block in self._bins[sizes[index]]:
                if -address % alignment + size <= block.size:
                    return block
        return None

    def largest(self) -> int:
        """Bytes of the largest block."""
        return self._sizes[-1] if self._sizes else 0


class Heap:
    """A caching heap over an upstream."""

    def __init__(self, upstream: Upstream, rules: Rules = Rules(), number: int = 0) -> None:
        self.number = number
        """Number given by the owner."""
        self._upstream = upstream
        self._rules = rules
        self._segments: dict[int, Segment] = {}
        self._next_ordinal = 0
        self._clear_free_blocks()
        self.reserved = 0
        """Bytes of all segments."""
        self.live = 0
        """Bytes of the allocated blocks."""
        self.peak_live = 0
        self.hits = 0
        """Allocations that did not need upstream."""
        self.misses = 0
        self.upstream_calls = 0

    def _clear_free_blocks(self) -> None:
        # In segments for large blocks, and for small ones.
        self._partial = _FreeBlocks(), _FreeBlocks()  # in partly used segments
        self._whole = _FreeBlocks(), _FreeBlocks()  # whole segments

    @property
    def segments(self) -> Collection[Segment]:
        """The segments, in order of creation."""
        return self._segments.values()

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block."""
        return max(blocks.largest() for blocks in (*self._partial, *self._whole))

    def blocks(self) -> Iterator[Block]:
        """All blocks, by segment and offset."""
        return chain.from_iterable(segment.blocks() for segment in self.segments)

    def allocate(self, nbytes: int, alignment: int = GRAIN) -> Block:
        """Allocate a block for more than 0 bytes, at an alignment that is a power of two.

        Raises:
            MemoryError: upstream has no more, even after all free segments were returned.
        """
        size, needed, is_small = self._rounded(nbytes, alignment)
        block = self._find(size, alignment, is_small)
        if block is None:
            block = self._grow(size, needed, is_small)
            self.misses += 1
        else:
            self.hits += 1
        block = self._carve(block, size, alignment)
        block.requested = nbytes
        self.live += size
        if self.live > self.peak_live:
            self.peak_live = self.live
        block.is_free = False  # last: if interrupted before, it is free
        return block

    def fits(self, nbytes: int, alignment: int = GRAIN) -> bool:
        """Whether :meth:`allocate` would not need upstream."""
        size, _, is_small = self._rounded(nbytes, alignment)
        return self._find(size, alignment, is_small) is not None

    def free(self, block: Block) -> None:
        """Free a block.

        Raises:
            ValueError: the block is free already, or of another heap.
        """
        segment = block.segment
        if self._segments.get(segment.ordinal) is not segment:
            raise ValueError("the block does not belong to this heap, or its memory was returned")
        if block.is_free:
            raise ValueError("double free: the block is free already")
        block.is_free = True
        block.tag = None
        block.requested = 0
        self.live -= block.size
        following = block.next
        if following is not None and following.is_free:
            self._remove_free(following)
            self._absorb_next(block)
        previous = block.previous
        if previous is not None and previous.is_free:
            self._remove_free(previous)
            self._absorb_next(previous)
            block = previous
        self._add_free(block)

    def trim(self, target: int = 0) -> int:
        """Return free segments, largest first, until ``reserved <= target``; result in bytes."""
        before = self.reserved
        for block in sorted(self._whole_blocks(), key=lambda b: (-b.size, b.segment.ordinal)):
            if self.reserved <= target:
                break
            self.release_segment(block)
        return before - self.reserved

    def release_segment(self, block: Block) -> None:
        """Return the segment that consists of this free block."""
        segment = block.segment
        self._remove_free(block)
        # Removed from the chains first: memory that upstream owns again must not be used.
        del self._segments[segment.ordinal]
        self.reserved -= segment.size
        self.upstream_calls += 1
        self._upstream.release(segment.handle)
        segment.handle = None  # segment and block form a cycle that lives until a collection

    def repair(self) -> None:
        """Derive all state from the chains, after an interrupted call.

        A block that :meth:`allocate` returned stays allocated even if its caller was interrupted
        before setting the tag; an owner that tags all blocks can find and free it.
        """
        self._clear_free_blocks()
        self.reserved = self.live = 0
        for segment in self._segments.values():
            self.reserved += segment.size
            self._repair_chain(segment)
        self.peak_live = max(self.peak_live, self.live)

    def _repair_chain(self, segment: Segment) -> None:
        previous = None
        block: Block | None = segment.first
        while block is not None:
            while block.is_free and block.next is not None and block.next.is_free:
                block.next = block.next.next
            following = block.next
            end = segment.address + segment.size if following is None else following.address
            block.size = end - block.address
            block.previous = previous
            if block.is_free:
                block.tag = None
                block.requested = 0
                self._add_free(block)
            else:
                self.live += block.size
            previous, block = block, following

    def _rounded(self, nbytes: int, alignment: int) -> tuple[int, int, bool]:
        """A request's block size, the smallest segment for it, and whether it is small."""
        rules = self._rules
        size = -(-nbytes // rules.rounding) * rules.rounding
        skipped = max(alignment - GRAIN, 0)  # at most, wherever a segment begins
        needed = size + -(-skipped // rules.rounding) * rules.rounding
        return size, needed, needed <= rules.small_limit

    def _find(self, size: int, alignment: int, is_small: bool) -> Block | None:
        """The free block to take for a request, or None if the heap should grow."""
        block = self._partial[is_small].best_fit(size, alignment)
        if block is None:
            # Last, so that free segments stay whole and can be returned.
            block = self._whole[is_small].best_fit(size, alignment)
            if block is not None and self._is_better_replaced(block, size):
                return None
        return block

    def _is_better_replaced(self, block: Block, size: int) -> bool:
        """Whether to return this free segment for one of the request's size: see ``Rules``."""
        rules = self._rules
        if size < rules.replace_limit or block.size - size <= rules.replace_rest * size:
            return False
        held = self.reserved - sum(whole.size for whole in self._whole_blocks())
        return held + size > self._bound(size)

    def _bound(self, size: int) -> int:
        """Bytes that may be reserved once ``size`` more are live."""
        peak = max(self.peak_live, self.live + size)
        return peak + int(self._rules.over_reserve * peak) + self._rules.slack

    def _grow(self, size: int, needed: int, is_small: bool) -> Block:
        """The block of a new segment of at least ``needed`` bytes."""
        rules = self._rules
        bound = self._bound(size)
        if is_small:
            nbytes = rules.small_segment
            self.trim(bound - nbytes)
        else:
            # One segment replaces all free ones: fewer, larger segments fit more requests.
            self.trim()
            room = (bound - self.reserved) // rules.rounding * rules.rounding
            nbytes = max(needed, room)
        try:
            return self._add_segment(nbytes, is_small)
        except MemoryError:
            if not self.trim() and nbytes == needed:
                raise
        return self._add_segment(needed, is_small)

    def _add_segment(self, nbytes: int, is_small: bool) -> Block:
        self.upstream_calls += 1
        address, handle = self._upstream.allocate(nbytes)
        ordinal = self._next_ordinal
        self._next_ordinal = ordinal + 1  # before the segment is listed: ordinals stay unique
        segment = Segment(address, nbytes, handle, ordinal, is_small)
        self._segments[ordinal] = segment
        self.reserved += nbytes
        self._add_free(segment.first)
        return segment.first

    def _whole_blocks(self) -> Iterator[Block]:
        """Free blocks that are whole segments."""
        return chain(*self._whole)

    def _carve(self, block: Block, size: int, alignment: int) -> Block:
        """Cut an aligned block of this size out of a free one; the rest stays free."""
        self._remove_free(block)
        skipped = -block.address % alignment
        if skipped:
            front, block = block, split(block, skipped)
            self._add_free(front)
        if size < block.size:
            self._add_free(split(block, size))
        return block

    def _absorb_next(self, block: Block) -> None:
        """Merge a free block with the next one, which is free too."""
        absorbed = block.next
        assert absorbed is not None
        following = block.next = absorbed.next
        block.size += absorbed.size
        if following is not None:
            following.previous = block

    def _add_free(self, block: Block) -> None:
        self._index(block).add(block)

    def _remove_free(self, block: Block) -> None:
        self._index(block).remove(block)

    def _index(self, block: Block) -> _FreeBlocks:
        """The list for a free block of this size."""
        segment = block.segment
        group = self._whole if block.size == segment.size else self._partial
        return group[segment.is_small]
