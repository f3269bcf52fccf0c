"""A pool compared with a naive model: allocations keep their place, bytes and size."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from allocator import OutOfMemoryError, Pool
from tests.allocator.helpers import KIB, MIB, AligningDriver, check_cache

ARENA = 256 * MIB
REDZONE = 512
PAGE = 4 * KIB
MOST_HELD = 30
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)

sizes = st.one_of(
    st.sampled_from([1, 2, 511, 512, 513, 64 * KIB, MIB, MIB + 1]),
    st.integers(1, 4 * KIB),
    st.floats(0, 22).map(lambda exponent: int(2**exponent)),
)
shapes = st.one_of(
    st.sampled_from([1, 8, (3, 5), (64, 64), (), (2, 0)]),
    st.integers(1, 300_000),
    st.tuples(st.integers(0, 100), st.integers(1, 100)),
)


class Item(NamedTuple):
    """An allocation that was handed out, and what the model knows about it."""

    keeper: Any
    address: int
    nbytes: int
    size: int
    mark: int


class PoolAgainstModel(RuleBasedStateMachine):
    """A pool compared with a list of its live allocations."""

    driver: Any = None

    @initialize(
        options=st.sampled_from([{}, {}, {"debug": True}, {"stable_addresses": ARENA}]),
    )
    def start(self, options: dict[str, Any]) -> None:
        self.held: list[Item] = []
        self.marks = itertools.count(1)
        self.margin = REDZONE if "debug" in options else 0
        self.is_stable = "stable_addresses" in options
        self.allowed = 2**60
        """bytes that may be reserved: the limit, or 2**60 without one."""
        self.pool = self.new_pool(**options)

    def new_pool(self, **options: Any) -> Pool:
        self.driver = AligningDriver()
        return Pool(driver=self.driver, **options)

    def size_of(self, nbytes: int, alignment: int) -> int:
        """The size of the block for a request."""
        is_staggered = nbytes > MIB and alignment <= 512
        front = -(-self.margin // alignment) * alignment
        room = front + nbytes + self.margin + (PAGE - 512 if is_staggered else 0)
        return -(-room // 512) * 512

    def give(self, keeper: Any, address: int, nbytes: int, alignment: int = 512) -> None:
        """Record an allocation by the pool, and mark all of its bytes."""
        assert address % alignment == 0
        if nbytes == 0:
            return
        for other in self.held:
            assert address + nbytes <= other.address or other.address + other.nbytes <= address
        mark = next(self.marks) % 255
        ctypes.memset(address, mark, nbytes)
        self.held.append(Item(keeper, address, nbytes, self.size_of(nbytes, alignment), mark))

    def check_bytes(self, item: Item) -> None:
        found = ctypes.string_at(item.address, item.nbytes)
        assert found.count(bytes([item.mark])) == item.nbytes

    def take(self, choice: int) -> Item:
        item = self.held.pop(choice % len(self.held))
        self.check_bytes(item)
        return item

    @contextlib.contextmanager
    def allowing_refusal(self) -> Iterator[None]:
        try:
            yield
        except OutOfMemoryError:
            assert self.allowed < 2**60 or self.is_stable

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule(shape=shapes, dtype=st.sampled_from(DTYPES), count=st.integers(1, 3))
    def empty(self, shape: Any, dtype: torch.dtype, count: int) -> None:
        for _ in range(count):
            with self.allowing_refusal():
                x = self.pool.empty(shape, dtype)
                assert x.shape == torch.Size(shape if isinstance(shape, tuple) else (shape,))
                assert x.dtype == dtype
                self.give(x, x.data_ptr(), x.nbytes)

    @rule(shape=shapes, count=st.integers(1, 20))
    def loop(self, shape: Any, count: int) -> None:
        """Make and drop tensors that reuse each other's memory."""
        with self.allowing_refusal():
            for i in range(count):
                x = self.pool.full(shape, float(i))
                y = self.pool.full(shape, -1.0)
                assert (x == i).all()
                assert (y == -1).all()
                del x, y

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule(nbytes=sizes, alignment=st.sampled_from([512, 512, 2 * KIB, PAGE, 2 * MIB]))
    def allocate(self, nbytes: int, alignment: int) -> None:
        with self.allowing_refusal():
            memory = self.pool.allocate(nbytes, alignment=alignment)
            self.give(memory, memory.address, nbytes, alignment)

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule(shape=shapes, through_torch=st.booleans())
    def array(self, shape: Any, through_torch: bool) -> None:
        with self.allowing_refusal():
            array = self.pool.array(shape, "int16")
            keeper = torch.from_dlpack(array) if through_torch else array
            self.give(keeper, array.address if array.nbytes else 0, array.nbytes)

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule(parts=st.lists(st.integers(1, 64 * KIB), max_size=4), more=st.integers(0, MIB))
    def reserve(self, parts: list[int], more: int) -> None:
        """Within a reservation that succeeded, allocating the parts cannot fail."""
        nbytes = sum(self.size_of(part, 512) for part in parts) + more
        with contextlib.ExitStack() as block:
            try:
                reservation = block.enter_context(self.pool.reserve(nbytes))
            except OutOfMemoryError:
                assert self.allowed < 2**60 or self.is_stable
                return
            for part in parts:
                memory = self.pool.allocate(part)
                self.give(memory, memory.address, part)
            assert reservation.left == -(-more // 512) * 512

    @precondition(lambda self: self.held)
    @rule(choices=st.lists(st.integers(0, 2**16), min_size=1, max_size=5))
    def drop(self, choices: list[int]) -> None:
        for choice in choices:
            if self.held:
                self.take(choice)

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 2**16))
    def release(self, choice: int) -> None:
        item = self.take(choice)
        if hasattr(item.keeper, "release"):
            item.keeper.release()
            with pytest.raises(ValueError, match="double free"):
                item.keeper.release()

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 2**16))
    def keep_only_a_view(self, choice: int) -> None:
        item = self.held.pop(choice % len(self.held))
        if torch.is_tensor(item.keeper):
            item = item._replace(keeper=item.keeper.reshape(-1)[-1:])
        self.held.append(item)

    @precondition(lambda self: self.held)
    @rule(choice=st.integers(0, 2**16))
    def lose_in_a_cycle(self, choice: int) -> None:
        cycle: list[Any] = [self.take(choice).keeper]
        cycle.append(cycle)
        del cycle
        gc.collect()

    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        before = self.pool.memory_reserved()
        given_back = self.pool.trim(int(part * before))
        assert self.pool.memory_reserved() == before - given_back
        if part == 0 and not self.held and not self.is_stable:
            assert before == given_back

    @precondition(lambda self: not self.is_stable)
    @rule(room=st.sampled_from([None, 0, 4 * MIB, 64 * MIB]))
    def limit(self, room: int | None) -> None:
        reserved = self.pool.memory_reserved()
        self.pool.set_limit(None if room is None else reserved + room)
        self.allowed = 2**60 if room is None else reserved + room

    @rule()
    def look(self) -> None:
        self.pool.memory_stats()
        self.pool.snapshot()
        if self.margin:
            self.pool.check()

    @invariant()
    def agrees(self) -> None:
        live = sum(item.size for item in self.held)
        assert self.pool.memory_allocated() == live
        reserved = self.pool.memory_reserved()
        assert live <= reserved <= self.allowed
        assert reserved == self.pool._core.store.source.reserved
        if self.driver is not None:
            assert reserved == self.driver.reserved
        self.pool.tally()
        check_cache(self.pool)
        for heap in self.pool._core.store.heaps.values():
            blocks = [block for block in heap.blocks() if not block.is_free]
            assert heap.live == sum(block.size for block in blocks)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.held:
            self.take(0)
        self.pool.close()
        assert self.pool.memory_allocated() == self.pool.memory_reserved() == 0
        if self.driver is not None:
            assert not self.driver.held


class DevicePoolAgainstModel(PoolAgainstModel):
    """The same test on device memory."""

    def new_pool(self, **options: Any) -> Pool:
        return Pool("cpu", **options)


TestPoolAgainstModel = PoolAgainstModel.TestCase
TestDevicePoolAgainstModel = DevicePoolAgainstModel.TestCase
TestPoolAgainstModel.settings = TestDevicePoolAgainstModel.settings = settings(
    derandomize=True, database=None, deadline=None, max_examples=25, stateful_step_count=50
)
