"""Where a pool places blocks; the upstream hands out addresses without memory."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from allocator.pool import blocks as blocks_module
from allocator.pool.blocks import Block, Heap, Rules, Segment
from tests.allocator.helpers import KIB, MIB
from tests.garbage import without_collections
from tests.interrupts import InterruptAt
from tests.running import in_threads

RULES = Rules()


class Handle:
    """Holds the bytes of a segment; dropping it gives them back."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Upstream:
    """Hands out addresses, by default multiples of 512 and of no larger power of two."""

    def __init__(self, addresses: Iterator[int] | None = None) -> None:
        self.handles = weakref.WeakSet[Handle]()
        self.sizes: list[int] = []
        self.limit = sys.maxsize
        self._addresses = addresses or itertools.count(MIB + 512, 2**40)

    @property
    def reserved(self) -> int:
        return sum(handle.nbytes for handle in self.handles)

    def allocate(self, nbytes: int) -> tuple[int, Handle]:
        if self.reserved + nbytes > self.limit:
            raise MemoryError(f"{nbytes} bytes")
        handle = Handle(nbytes)
        self.handles.add(handle)
        self.sizes.append(nbytes)
        return next(self._addresses), handle

    def release(self, handle: Handle) -> None:
        self.handles.remove(handle)


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def heap(upstream: Upstream) -> Heap:
    return Heap(upstream)


def blocks_of(segment: Segment) -> list[Block]:
    blocks = [segment.first]
    while (following := blocks[-1].next) is not None:
        blocks.append(following)
    return blocks


def place(block: Block) -> tuple[int, int]:
    """The number of a block's segment and its offset there, which do not depend on addresses."""
    return block.segment.ordinal, block.address - block.segment.address


def is_whole(segment: Segment) -> bool:
    return segment.first.is_free and segment.first.next is None


def bound(heap: Heap) -> int:
    most = heap.peak_live + int(RULES.over_reserve * heap.peak_live) + RULES.slack
    return most // 512 * 512


def indexed(heap: Heap) -> list[Block]:
    return [block for index in (*heap._partial, *heap._whole) for block in index]


def check(heap: Heap, upstream: Upstream, *, was_interrupted: bool = False) -> None:
    """Check that blocks tile their segments, and that all derived figures are right."""
    free = []
    live = reserved = 0
    for segment in heap.segments:
        blocks = blocks_of(segment)
        ends = [block.address + block.size for block in blocks]
        assert [block.address for block in blocks] == [segment.address, *ends[:-1]]
        assert ends[-1] == segment.address + segment.size
        assert [block.previous for block in blocks] == [None, *blocks[:-1]]
        assert all(block.segment is segment for block in blocks)
        assert all(block.size > 0 and block.size % 512 == 0 for block in blocks)
        assert not any(a.is_free and b.is_free for a, b in itertools.pairwise(blocks))
        free += [block for block in blocks if block.is_free]
        live += sum(block.size for block in blocks if not block.is_free)
        reserved += segment.size
    assert all(block.tag is None and block.requested == 0 for block in free)
    assert set(map(place, indexed(heap))) == set(map(place, free))
    assert len(indexed(heap)) == len(free)
    assert heap.largest_free == max((block.size for block in free), default=0)
    assert (heap.live, heap.reserved) == (live, reserved)
    handles = {segment.handle for segment in heap.segments}
    assert handles <= set(upstream.handles)
    if not was_interrupted:  # otherwise the collector returns unreferenced handles
        assert handles == set(upstream.handles)
    assert heap.peak_live >= live


def test_small_and_large_do_not_share_segments(heap: Heap, upstream: Upstream) -> None:
    small = heap.allocate(RULES.small_limit)
    large = heap.allocate(RULES.small_limit + 1)
    assert (small.segment.is_small, large.segment.is_small) == (True, False)
    assert upstream.sizes[0] == RULES.small_segment
    assert [segment.ordinal for segment in heap.segments] == [0, 1]


def test_first_large_segment_is_as_large_as_the_bound(heap: Heap, upstream: Upstream) -> None:
    heap.allocate(100 * MIB)
    assert upstream.sizes == [111 * MIB]  # 3% and 8 MiB more


def test_split(heap: Heap) -> None:
    first, second = heap.allocate(1000), heap.allocate(1)
    assert (place(first), place(second)) == ((0, 0), (0, 1024))
    assert [block.size for block in heap.blocks()] == [1024, 512, 2 * MIB - 1536]
    assert (heap.misses, heap.hits, heap.upstream_calls) == (1, 1, 1)


def holes(heap: Heap, *sizes: int) -> list[int]:
    """Make free blocks of these sizes between others, and return their addresses."""
    found = [(heap.allocate(size), heap.allocate(512))[0] for size in sizes]
    for block in found:
        heap.free(block)
    return [block.address for block in found]


def test_best_fit(heap: Heap) -> None:
    addresses = holes(heap, 8 * KIB, 4 * KIB, 6 * KIB)
    assert heap.allocate(5 * KIB).address == addresses[2]
    assert heap.allocate(6 * KIB).address == addresses[0]
    assert heap.allocate(1).address == addresses[2] + 5 * KIB  # the smallest hole left


def test_exact_size_is_found_first(heap: Heap) -> None:
    addresses = holes(heap, 5 * KIB, 4 * KIB, 4 * KIB)
    assert [heap.allocate(4 * KIB).address for _ in range(3)] == addresses[1:] + addresses[:1]


def test_of_equal_sizes_the_oldest_segment_then_the_lowest_offset() -> None:
    heap = Heap(Upstream(itertools.count(2**60, -(2**40))))
    blocks = [heap.allocate(RULES.small_limit) for _ in range(96)]
    others = blocks[1::2]
    for block in random.Random(0).sample(others, len(others)):
        heap.free(block)
    found = [heap.allocate(RULES.small_limit) for _ in others]
    assert list(map(place, found)) == sorted(map(place, found))
    assert {place(block)[0] for block in found} == {0, 1, 2}


def test_offsets_do_not_depend_on_addresses() -> None:
    scattered = random.Random(1).sample(range(1, 2**20), 2**12)
    heaps = [Heap(Upstream()), Heap(Upstream(2**40 * n + 512 for n in scattered))]
    live: list[list[Block]] = [[], []]
    choose = random.Random(2)
    for _ in range(2000):
        if live[0] and choose.random() < 0.45:
            index = choose.randrange(len(live[0]))
            for heap, blocks in zip(heaps, live):
                heap.free(blocks.pop(index))
        else:
            nbytes = int(2 ** choose.uniform(0, 25))
            for heap, blocks in zip(heaps, live):
                blocks.append(heap.allocate(nbytes))
            assert place(live[0][-1]) == place(live[1][-1])


def test_a_free_segment_is_cut_last(upstream: Upstream) -> None:
    heap = Heap(upstream, Rules(small_limit=0, over_reserve=0, slack=0))
    heap.free(heap.allocate(100 * KIB))
    small, large = heap.allocate(5 * KIB), heap.allocate(95 * KIB)
    other = heap.allocate(94 * KIB)
    assert [segment.size for segment in heap.segments] == [100 * KIB, 94 * KIB]
    heap.free(large)
    heap.free(other)
    assert heap.allocate(90 * KIB).segment is small.segment  # though the other fits better


def test_alignment_looks_beyond_the_best_fit(heap: Heap) -> None:
    tight, roomy = holes(heap, 4 * KIB, 8 * KIB)
    assert tight % (4 * KIB) != 0
    assert roomy < heap.allocate(4 * KIB, 4 * KIB).address < roomy + 4 * KIB


class TestOverReserve:
    """Free memory is returned before the heap grows beyond its bound."""

    def test_bound(self, heap: Heap, upstream: Upstream) -> None:
        for nbytes in (100 * MIB, 120 * MIB, 140 * MIB):
            heap.free(heap.allocate(nbytes))
            assert heap.reserved == bound(heap)
        assert len(upstream.handles) == 1

    def test_small_segments_count_too(self, heap: Heap, upstream: Upstream) -> None:
        blocks = [heap.allocate(RULES.small_limit) for _ in range(32 * 16)]
        for block in blocks:
            heap.free(block)
        assert heap.reserved == 32 * MIB
        heap.allocate(38 * MIB)
        assert heap.reserved == bound(heap)

    def test_nothing_goes_back_while_there_is_room(self, heap: Heap, upstream: Upstream) -> None:
        heap.free(heap.allocate(100 * MIB))
        heap.allocate(90 * MIB)
        heap.allocate(1)
        assert heap.upstream_calls == 2

    @pytest.mark.parametrize(("nbytes", "segment_size"), [(9 * KIB, 9 * KIB), (14 * KIB, 16 * KIB)])
    def test_beyond_the_bound_a_free_segment_is_replaced(
        self, upstream: Upstream, nbytes: int, segment_size: int
    ) -> None:
        """The free segment is replaced unless little of it would be left over."""
        rules = Rules(small_limit=0, over_reserve=0, slack=0, replace_limit=8 * KIB)
        heap = Heap(upstream, rules)
        heap.free(heap.allocate(16 * KIB))
        heap.allocate(8 * KIB)
        heap.free(heap.allocate(16 * KIB))
        # 32 KiB are reserved, at most 24 were live; without the free segment 16 are reserved.
        assert (heap.reserved, heap.peak_live) == (32 * KIB, 24 * KIB)
        assert heap.allocate(nbytes).segment.size == segment_size
        check(heap, upstream)

    def test_within_the_bound_a_free_segment_is_cut(self, upstream: Upstream) -> None:
        rules = Rules(small_limit=0, over_reserve=0, slack=0, replace_limit=8 * KIB)
        heap = Heap(upstream, rules)
        heap.free(heap.allocate(16 * KIB))
        assert heap.allocate(8 * KIB).segment.size == 16 * KIB

    def test_repeated_work_stops_calling_upstream(self, heap: Heap) -> None:
        choose = random.Random(3)
        sizes = [int(2 ** choose.uniform(9, 25)) for _ in range(300)]
        freed = [choose.randrange(index + 1) for index in range(300)]
        calls = []
        for _ in range(6):
            before = heap.upstream_calls
            live: list[Block] = []
            for nbytes, index in zip(sizes, freed):
                live.append(heap.allocate(nbytes))
                if index < len(live) // 2:
                    heap.free(live.pop(index))
            for block in live:
                heap.free(block)
            calls.append(heap.upstream_calls - before)
        assert calls[0] > 0
        assert calls[-2:] == [0, 0]


def test_trim_takes_the_largest_first_down_to_the_target(upstream: Upstream) -> None:
    heap = Heap(upstream, Rules(small_limit=0, over_reserve=0, slack=0))
    for block in [heap.allocate(size * KIB) for size in (10, 30, 20)]:
        heap.free(block)
    assert heap.trim(60 * KIB) == 0
    assert heap.trim(59 * KIB) == 30 * KIB
    assert heap.trim(5 * KIB) == 30 * KIB
    check(heap, upstream)


class TestUpstreamFails:
    def test_free_segments_go_back_and_it_is_asked_again(self, upstream: Upstream) -> None:
        heap = Heap(upstream)
        heap.free(heap.allocate(100))
        upstream.limit = RULES.small_segment
        heap.allocate(RULES.small_segment)
        assert heap.reserved == RULES.small_segment
        check(heap, upstream)

    def test_it_is_asked_for_no_more_than_needed(self, heap: Heap, upstream: Upstream) -> None:
        upstream.limit = 3 * MIB
        assert heap.allocate(3 * MIB).segment.size == 3 * MIB
        upstream.limit = 3 * MIB + 512
        assert heap.allocate(1).segment.size == 512
        check(heap, upstream)

    def test_the_error_gets_through(self, heap: Heap, upstream: Upstream) -> None:
        kept = heap.allocate(MIB)
        freed = heap.allocate(100)
        heap.free(freed)
        upstream.limit = heap.reserved
        before = place(kept), heap.live, heap.peak_live, heap.hits, heap.misses
        with pytest.raises(MemoryError, match=f"{20 * MIB} bytes"):
            heap.allocate(20 * MIB)
        assert before == (place(kept), heap.live, heap.peak_live, heap.hits, heap.misses)
        check(heap, upstream)
        assert heap.allocate(MIB).segment is kept.segment


class TestBadFree:
    def test_twice(self, heap: Heap, upstream: Upstream) -> None:
        first, second = heap.allocate(1), heap.allocate(1)
        heap.free(second)
        heap.free(first)  # absorbs the second
        for block in (first, second):
            with pytest.raises(ValueError, match="double free"):
                heap.free(block)
        check(heap, upstream)

    def test_after_its_segment_went_back(self, heap: Heap, upstream: Upstream) -> None:
        block = heap.allocate(1)
        heap.free(block)
        heap.trim()
        with pytest.raises(ValueError, match="not belong to this heap"):
            heap.free(block)
        check(heap, upstream)

    def test_of_another_heap(self, heap: Heap, upstream: Upstream) -> None:
        heap.allocate(1)
        foreign = Heap(Upstream()).allocate(1)
        with pytest.raises(ValueError, match="not belong to this heap"):
            heap.free(foreign)
        assert not foreign.is_free
        check(heap, upstream)


def test_memory_given_back_is_kept_by_nothing(heap: Heap, upstream: Upstream) -> None:
    """Handles are dropped without a collection, although blocks and segments form cycles."""
    blocks = [heap.allocate(nbytes) for nbytes in (100, 3 * MIB)]
    heap.free(blocks[0])
    kept = [weakref.ref(segment.handle) for segment in heap.segments]
    with without_collections():
        heap.trim()
        assert [handle() is None for handle in kept] == [True, False]


class HeapAgainstModel(RuleBasedStateMachine):
    """A heap compared with a list of the live ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.upstream = Upstream()
        self.heap = Heap(self.upstream)
        self.live: list[tuple[Block, int, int]] = []
        self.peak = 0

    @rule(
        exponent=st.floats(0, 25),
        alignment=st.sampled_from([512, 512, 512, 4 * KIB, 2 * MIB]),
    )
    def allocate(self, exponent: float, alignment: int) -> None:
        nbytes = int(2**exponent)
        misses, served = self.heap.misses, self.heap.hits + self.heap.misses
        is_hit = self.heap.fits(nbytes, alignment)
        try:
            block = self.heap.allocate(nbytes, alignment)
        except MemoryError:
            assert not is_hit
            return
        assert block.address % alignment == 0
        assert block.requested == nbytes <= block.size < nbytes + 512
        assert self.heap.hits + self.heap.misses == served + 1
        assert (self.heap.misses == misses) == is_hit
        for other, address, size in self.live:
            assert block is not other
            assert block.address + nbytes <= address or address + size <= block.address
        block.tag = self
        self.live.append((block, block.address, nbytes))
        self.peak = max(self.peak, sum(block.size for block, _, _ in self.live))
        if not is_hit:
            has_free = any(map(is_whole, self.heap.segments))
            assert self.heap.reserved <= bound(self.heap) or not has_free

    @precondition(lambda self: self.live)
    @rule(choice=st.integers(0, 2**16))
    def free(self, choice: int) -> None:
        block, _, _ = self.live.pop(choice % len(self.live))
        self.heap.free(block)
        with pytest.raises(ValueError, match="double free"):
            self.heap.free(block)

    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        before = self.heap.reserved
        target = int(part * before)
        assert self.heap.trim(target) == before - self.heap.reserved
        has_free = any(map(is_whole, self.heap.segments))
        assert self.heap.reserved <= target or not has_free

    @rule(room=st.sampled_from([0, 4 * MIB, 2**40]))
    def limit(self, room: int) -> None:
        self.upstream.limit = self.heap.reserved + room

    @rule()
    def repair(self) -> None:
        """A repair of intact records changes nothing."""
        before = [(place(block), block.size, block.is_free) for block in self.heap.blocks()]
        self.heap.repair()
        assert before == [(place(block), block.size, block.is_free) for block in self.heap.blocks()]

    @invariant()
    def agrees(self) -> None:
        check(self.heap, self.upstream)
        live = [block for block in self.heap.blocks() if not block.is_free]
        assert set(live) == {block for block, _, _ in self.live}
        for block, address, nbytes in self.live:
            assert (block.address, block.requested, block.tag) == (address, nbytes, self)
        assert self.heap.peak_live == self.peak


TestHeapAgainstModel = HeapAgainstModel.TestCase
TestHeapAgainstModel.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=60, stateful_step_count=60
)


class Scene:
    """A heap with every situation that a call may encounter."""

    def __init__(self) -> None:
        self.upstream = Upstream()
        self.heap = Heap(self.upstream)
        sizes = (600, 512, 4 * KIB, 512, 9 * KIB, 512, 512, MIB, 3 * MIB, 512)
        self.blocks = [self.heap.allocate(size) for size in sizes]
        for index in (2, 4, 6, 8):
            self.free(index)
        for block in self.blocks:
            if not block.is_free:
                block.tag = "owner"

    def free(self, index: int) -> None:
        self.heap.free(self.blocks[index])

    def allocate_too_much(self) -> None:
        self.upstream.limit = self.heap.reserved
        with contextlib.suppress(MemoryError):
            self.heap.allocate(2**40)


CALLS: dict[str, tuple[Callable[[Scene], object], list[int]]] = {
    "exact size": (lambda scene: scene.heap.allocate(4 * KIB), []),
    "split": (lambda scene: scene.heap.allocate(5 * KIB), []),
    "split in front": (lambda scene: scene.heap.allocate(4 * KIB, 4 * KIB), []),
    "grow": (lambda scene: scene.heap.allocate(30 * MIB), []),
    "replace": (lambda scene: (scene.free(7), scene.heap.allocate(30 * MIB)), [7]),
    "fail": (lambda scene: scene.allocate_too_much(), []),
    "free": (lambda scene: scene.free(0), [0]),
    "free before a free one": (lambda scene: scene.free(1), [1]),
    "free between free ones": (lambda scene: scene.free(5), [5]),
    "trim": (lambda scene: (scene.free(7), scene.heap.trim()), [7]),
    "repair": (lambda scene: scene.heap.repair(), []),
}
"""Calls, and the blocks that they free; the others are live afterwards, however the call ended."""


@pytest.mark.parametrize("name", CALLS)
def test_interrupted_anywhere(name: str) -> None:
    """After a repair no blocks overlap, none is lost, and those that were not returned are free."""
    call, indices = CALLS[name]
    returning = 0

    def interrupt() -> None:
        with stop:
            call(scene)

    for after in itertools.count():
        scene = Scene()
        kept = {block for block in scene.blocks if not block.is_free}
        freed = {scene.blocks[index] for index in indices}
        stop = InterruptAt(after, "opcodes", within=blocks_module)
        # In a thread of its own: stopped in an except clause, CPython 3.11 leaves the exception in
        # sys.exc_info(), and with it all that its frames refer to.
        in_threads(interrupt, count=1)
        if not stop.has_raised:
            break
        scene.heap.repair()
        check(scene.heap, scene.upstream, was_interrupted=True)
        live = {block for block in scene.heap.blocks() if not block.is_free}
        assert kept - freed <= live
        assert all(block.tag == "owner" and block.requested for block in live & kept)
        for block in live - kept:  # it was being returned
            assert block.tag is None
            scene.heap.free(block)
            returning += 1
        scene.heap.free(scene.heap.allocate(2 * KIB))
        check(scene.heap, scene.upstream, was_interrupted=True)
    assert after > 20
    assert returning <= 2  # instructions after the one that marks the block allocated
