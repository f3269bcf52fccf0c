"""What every pool does, whatever its options."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from allocator import Hook, OutOfMemoryError, Pool
from tests.pool_cases import KIB, MIB, POOL_CASES, PoolCase


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
    blocks = [b for segment in pool.snapshot()["segments"] for b in segment["blocks"]]
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
    held = [pool.allocate(n, alignment=alignment) for n in (1, 1000, 5000)]
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
    with pool.reserve(MIB) as reservation, pool.budget(64 * KIB) as budget:
        x = pool.empty(1000)
        assert reservation.left <= MIB - 4096
        assert budget.used == 4096
        with pytest.raises(OutOfMemoryError):
            pool.allocate(64 * KIB)
    del x
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


def test_threads(pool: Pool) -> None:
    wrong = []

    def work(mark: int) -> None:
        for n in range(100):
            x = pool.full(10 + n % 7, float(mark))
            y = pool.full(10 + n % 5, float(mark))
            if not ((x == mark).all() and (y == mark).all()):
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=[mark]) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_close_refuses_while_memory_is_in_use(pool: Pool) -> None:
    x = pool.empty(10)
    with pytest.raises(RuntimeError, match="1 allocations in use"):
        pool.close()
    assert pool.is_usable
    del x
