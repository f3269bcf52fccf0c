"""The contract of every pool, whatever its options."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from allocator import Allocation, Hook, OutOfMemoryError, Pool
from tests.allocator.helpers import AligningDriver, blocks_of
from tests.conftest import SEED
from tests.garbage import without_collections
from tests.interrupts import interrupted
from tests.pool_cases import KIB, MIB, POOL_CASES, PoolCase
from tests.running import in_fork, in_threads


@pytest.fixture(params=POOL_CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> PoolCase:
    case: PoolCase = request.param
    return case


@pytest.fixture
def pool(case: PoolCase) -> Iterator[Pool]:
    pool = case.make()
    yield pool
    gc.collect()
    assert pool.memory_allocated() == 0
    if case.margin:
        pool.check()
    pool.close()
    assert pool.memory_reserved() == 0


def test_tensors(pool: Pool) -> None:
    assert (pool.zeros((3, 5)) == 0).all()
    assert (pool.full(1000, 2.5) == 2.5).all()
    x = pool.empty_strided((3, 4), (1, 3), torch.int64)
    assert (x.shape, x.stride(), x.dtype) == ((3, 4), (1, 3), torch.int64)
    assert pool.empty_like(x).stride() == x.stride()
    assert pool.empty(()).shape == ()
    assert pool.empty((0, 3)).numel() == 0


def test_figures(pool: Pool, case: PoolCase) -> None:
    assert pool.memory_reserved() == case.arena
    x, memory = pool.empty(1000), pool.allocate(100)
    assert pool.memory_allocated() == case.size(4000) + case.size(100)
    stats = pool.memory_stats()
    assert stats["requested_bytes.all.current"] == 4100
    assert stats["allocation.all.current"] == 2
    assert stats["reserved_bytes.all.current"] == pool.memory_reserved() > 0
    del x
    memory.release()
    assert pool.memory_allocated() == 0
    assert pool.max_memory_allocated() == case.size(4000) + case.size(100)
    blocks = blocks_of(pool.snapshot())
    assert sum(block["size"] for block in blocks) == pool.memory_reserved()
    assert all(block["state"] != "active_allocated" for block in blocks)


def test_no_two_live_allocations_overlap(pool: Pool) -> None:
    held = [pool.full(100 + 37 * i, float(i)) for i in range(50)]
    del held[::3]
    held += [pool.full(500 + 11 * i, 100.0 + i) for i in range(30)]
    values = [float(x[0]) for x in held]
    assert len(set(values)) == len(held)
    assert all((x == value).all() for x, value in zip(held, values))


@pytest.mark.parametrize("alignment", [1, 512, 4 * KIB, 2 * MIB])
def test_alignment(pool: Pool, alignment: int) -> None:
    held = [pool.allocate(n, alignment=alignment) for n in (1, 1000, 5000, *[2 * MIB + 100] * 3)]
    assert all(memory.address % alignment == 0 for memory in held)


def test_reuse(pool: Pool, case: PoolCase) -> None:
    """A released tensor's memory serves the next one, at once or after its quarantine."""
    for i in range(50):
        x = pool.full(1000, float(i))
        assert (x == i).all()
        del x
    assert pool._core.bypasses_cache != case.reuses
    assert pool.memory_reserved() <= (case.arena or 4 * MIB)
    assert pool.memory_stats()["allocation.all.allocated"] == 50


def test_out_of_memory_leaves_the_pool_usable(pool: Pool, case: PoolCase) -> None:
    if case.limit is None:
        pool.set_limit("32MiB")
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(33 * MIB)
    assert (caught.value.requested, caught.value.pool) == (33 * MIB, case.name)
    assert (pool.full(1000, 1.0) == 1).all()
    assert pool.memory_stats()["num_ooms"] == 1
    assert pool.memory_reserved() <= 32 * MIB


def test_trim(pool: Pool, case: PoolCase) -> None:
    kept = pool.full(1000, 3.0)
    x = pool.empty(3 * MIB, torch.uint8)
    del x
    before = pool.memory_reserved()
    assert pool.trim() == before - pool.memory_reserved()
    assert (kept == 3).all()
    del kept
    pool.empty_cache()
    assert pool.memory_reserved() == case.arena


def test_exchange(pool: Pool) -> None:
    array = pool.array((3, 4), "int32")
    x = torch.from_dlpack(array).fill_(7)
    assert (np.from_dlpack(array) == 7).all()
    assert memoryview(array).shape == (3, 4)
    assert x.data_ptr() == array.address


def test_reservation_and_budget(pool: Pool) -> None:
    other = Pool(driver=AligningDriver())
    with pool.reserve(MIB) as reservation, pool.budget(64 * KIB) as budget:
        x, y = pool.empty(1000), other.allocate(MIB)
        assert reservation.left <= MIB - 4096
        assert budget.used == 4096
        left = reservation.left
        with pytest.raises(OutOfMemoryError, match="budget"):
            pool.allocate(64 * KIB)
        assert reservation.left == left
    del x, y
    assert (reservation.left, budget.used) == (0, 0)


def test_hooks(pool: Pool, case: PoolCase) -> None:
    sizes = []

    class Sizes(Hook):
        def allocated(self, pool: Pool, allocation: object) -> None:
            sizes.append(allocation.size)  # type: ignore[attr-defined]

    with pool.hook(Sizes()), pool.record() as trace:
        x = pool.empty(1000)
        del x
    assert sizes == [case.size(4000)]
    assert [event.action for event in trace] == ["allocate", "free"]
    assert trace.replay().allocations == 1


def test_nested_blocks_of_one_hook(pool: Pool, case: PoolCase) -> None:
    """The inner block's end leaves the outer block's hook."""
    nbytes: list[int] = []

    class Noting(Hook):
        def allocated(self, pool: Pool, allocation: Allocation) -> None:
            nbytes.append(allocation.nbytes)

    hook = Noting()
    with pool.hook(hook):
        with pool.hook(hook):
            pass
        pool.allocate(100)
    pool.allocate(200)
    assert nbytes == [100]


@pytest.mark.usefixtures("_many_switches")
def test_threads(pool: Pool, case: PoolCase) -> None:
    """Each thread has its own reservation, and another one inspects the pool meanwhile."""
    ended = threading.Semaphore(0)

    def work(number: int) -> None:
        choose = random.Random(SEED + number)
        try:
            for _ in range(15):
                with pool.reserve(64 * KIB) as reservation:
                    kept = [pool.allocate(choose.randrange(1, 4 * KIB)) for _ in range(8)]
                    used = sum(case.reserved_size(memory.nbytes) for memory in kept)
                    assert reservation.left == 64 * KIB - used
                    tensors = [pool.full(choose.randrange(1, 30_000), i) for i in range(8)]
                    for i, memory in enumerate(kept):
                        memory.copy_from_host(bytes([i]) * memory.nbytes)
                    for i, memory in enumerate(kept):
                        assert memory.copy_to_host() == bytes([i]) * memory.nbytes
                    assert all((x == i).all() for i, x in enumerate(tensors))
        finally:
            ended.release()

    def look() -> None:
        for _ in range(4):
            while not ended.acquire(timeout=0.001):
                pool.check() if case.margin else pool.snapshot()

    in_threads(lambda call: call(), look, *[partial(work, n) for n in range(4)])


def test_tasks(pool: Pool, case: PoolCase) -> None:
    """Each task has its own budget and reservation, which the tasks that it starts share."""
    nbytes, room = 4 * KIB, case.size(4 * KIB)

    async def own(count: int) -> tuple[int, int]:
        with pool.budget(MIB) as budget, pool.reserve(count * room) as reservation:
            x = pool.allocate(nbytes)
            await asyncio.sleep(0)
            y = pool.allocate(nbytes)
            left = reservation.left
            await asyncio.sleep(0)
            del x, y
            return budget.peak, left // room

    async def child() -> None:
        x = pool.allocate(nbytes)
        await asyncio.sleep(0)
        del x

    async def work() -> None:
        found = await asyncio.gather(*(own(count) for count in range(2, 9)))
        assert found == [(2 * nbytes, count - 2) for count in range(2, 9)]
        with pool.budget(2 * nbytes) as budget, pool.reserve(8 * room) as reservation:
            await asyncio.gather(child(), child())
            assert (budget.used, budget.peak) == (0, 2 * nbytes)
            assert reservation.left <= 7 * room
            with pytest.raises(OutOfMemoryError):
                await asyncio.gather(*(child() for _ in range(3)))

    asyncio.run(work())


@pytest.mark.parametrize("error", [KeyError, OutOfMemoryError, KeyboardInterrupt, GeneratorExit])
def test_exception_in_a_block(pool: Pool, case: PoolCase, error: type[BaseException]) -> None:
    def fail() -> None:
        with pool.budget(KIB + 512), pool.reserve(MIB):
            x = pool.allocate(100)
            if error is OutOfMemoryError:
                pool.allocate(20 * MIB)
            del x
            raise error

    with pytest.raises(error):
        fail()
    gc.collect()
    pool.allocate(MIB)
    assert pool.memory_allocated() == 0
    pool.trim()
    assert pool.memory_reserved() == case.arena


def test_interrupts(pool: Pool, case: PoolCase) -> None:
    """Wherever KeyboardInterrupt strikes, budgets and reservations recover their bytes."""
    held: list[Any] = []

    def step(choose: random.Random) -> None:
        with pool.reserve(64 * KIB):
            held.append(pool.empty(choose.choice([8, 100, 5000])))
            held.append(pool.allocate(choose.randrange(1, 8 * KIB)))
        while len(held) > 20:
            held.pop(choose.randrange(len(held)))

    with pool.budget(MIB) as budget, pool.reserve(MIB) as lasting:
        interrupted(step, count=100, most=2e-3)
        assert lasting.left > 0
        held.clear()
        gc.collect()
    assert pool.memory_allocated() == budget.used == 0
    assert budget.peak <= MIB
    pool.trim()
    levels = pool.tally().levels
    assert all(levels[name][0].current == 0 for name in ("active", "active_bytes"))
    assert pool.memory_reserved() == case.arena


def test_released_twice(pool: Pool) -> None:
    memory = pool.allocate(64)
    memory.release()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"double free.*{memory.address:#x}"):
            memory.release()
    others = [pool.allocate(64) for _ in range(3)]
    assert len({m.address for m in others}) == 3


@pytest.mark.parametrize("method", ["before_allocate", "allocated"])
def test_hook_that_refuses(pool: Pool, case: PoolCase, method: str) -> None:
    def refuse(self: Hook, pool: Pool, what: object) -> None:
        raise KeyError("not today")

    with pool.hook(type("Refusing", (Hook,), {method: refuse})()):
        for make in (pool.empty, pool.allocate, pool.array):
            with pytest.raises(KeyError, match="not today"):
                make(100)
    gc.collect()  # raised errors keep their frames alive
    pool.trim()
    assert pool.memory_reserved() == case.arena
    assert (pool.zeros(100) == 0).all()


def test_fork(pool: Pool, case: PoolCase) -> None:
    kept: list[Any] = [pool.full(8, 1.0), pool.full(100_000, 2.0), pool.allocate(1000)]
    used, parent = pool.memory_allocated(), os.getpid()

    def child() -> None:
        assert (kept[0] == 1).all()
        kept.clear()
        gc.collect()
        for give in (pool.empty, pool.allocate, pool.zeros):
            for n in (0, 8, 100_000):
                with pytest.raises(RuntimeError, match=f"belongs to process {parent}.*'spawn'"):
                    give(n)
        if not case.arena:
            with pytest.raises(RuntimeError, match="'spawn'"):
                pool.set_limit(0)
        assert case.on_device or pool.driver.held  # type: ignore[attr-defined]

    with pool.budget(MIB):
        in_fork(child)
    assert (kept[0] == 1).all()
    assert (kept[1] == 2).all()
    assert pool.memory_allocated() == used


def test_pool_dies_without_a_collection(case: PoolCase) -> None:
    pool = case.make()
    pool.record_history()
    with pool.reserve(MIB):
        pool.allocate(KIB)
    seen = weakref.ref(pool)
    pool.tally()  # or the pool would not know yet that nothing is in use
    with without_collections():
        del pool
        assert seen() is None


def test_close_refuses_while_memory_is_in_use(pool: Pool) -> None:
    _x = pool.empty(10)
    with pytest.raises(RuntimeError, match="1 allocations in use"):
        pool.close()
    assert pool.is_usable
