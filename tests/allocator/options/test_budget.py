"""Budgets limit what a block holds, whoever releases it and wherever it is interrupted."""

from __future__ import annotations

import contextvars
import gc
import pickle
import random
from typing import Any

import pytest
import torch

from allocator import Budget, Hook, OutOfMemoryError, Pool
from tests.allocator.helpers import KIB, MIB, FaultyDriver, once_inside
from tests.conftest import SEED
from tests.garbage import without_collections
from tests.running import in_threads


def test_charges_and_credits(pool: Pool) -> None:
    before = pool.empty(1000)
    with pool.budget("1MiB") as budget:
        assert (budget.limit, budget.used, budget.peak) == (MIB, 0, 0)
        x, y = pool.empty(1), pool.allocate(1000)
        assert budget.used == 512 + 1024
        del x
        assert (budget.used, budget.peak) == (1024, 1536)
        del before  # which was not charged
        assert budget.used == 1024
    _z = pool.empty(MIB)  # the block is over
    assert budget.used == 1024
    del y
    assert (budget.used, budget.peak) == (0, 1536)


def test_exact_limit(pool: Pool) -> None:
    with pool.budget(1024):
        x, _y = pool.allocate(512), pool.allocate(1)
        with pytest.raises(OutOfMemoryError):
            pool.allocate(1)
        del x
        _z = pool.allocate(512)
        pool.allocate(0)
        pool.empty((0, 5))
    with pool.budget(0), pytest.raises(OutOfMemoryError):
        pool.empty(1)


def test_error(pool: Pool) -> None:
    with pool.budget("1MiB", "scratch"):
        _x = pool.empty(1000)
        with pytest.raises(
            OutOfMemoryError,
            match=r"mine has no room for 4 MiB: the budget 'scratch' of 1 MiB, of which 4 KiB are",
        ) as caught:
            pool.empty(MIB)
    assert caught.value.requested == 4 * MIB
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pool.budget(1), pytest.raises(OutOfMemoryError, match="a budget of 1 B, of which 0 B"):
        pool.array(1)


def test_a_loop_stays_within(pool: Pool) -> None:
    """Released tensors are credited to the budget even if nobody queries the pool."""
    for _ in range(20):
        pool.empty(100)  # is cached
    with pool.budget(5 * KIB) as budget:
        for _ in range(100):
            pool.empty(1000)
            x = pool.empty(10)
        assert (budget.used, budget.peak) == (512, 4096 + 512)
        del x
        assert budget.used == 0
        kept = [pool.empty(100) for _ in range(10)]
        with pytest.raises(OutOfMemoryError):
            pool.empty(100)
    del kept
    assert budget.used == 0


def test_nested_budgets(pool: Pool) -> None:
    with pool.budget(8 * KIB, "outer") as outer:
        x = pool.allocate(2 * KIB)
        with pool.budget(4 * KIB, "inner") as inner:
            y = pool.allocate(4 * KIB)
            with pytest.raises(OutOfMemoryError, match="'inner'"):
                pool.allocate(1)
            assert (outer.used, inner.used) == (6 * KIB, 4 * KIB)
        with pytest.raises(OutOfMemoryError, match="'outer'"):
            pool.allocate(3 * KIB)
        del y
        assert (outer.used, inner.used) == (2 * KIB, 0)
        with pool.budget(100 * KIB), pytest.raises(OutOfMemoryError, match="'outer'"):
            pool.allocate(7 * KIB)
    del x
    assert (outer.used, outer.peak) == (0, 6 * KIB)


def test_inner_refusal_leaves_nothing_on_the_outer(pool: Pool) -> None:
    """The outer budget is not charged even if the inner one refuses after the allocation."""
    with pool.budget(MIB) as outer, pool.budget(MIB) as inner:

        class Greedy(Hook):
            def before_allocate(self, pool: Pool, nbytes: int) -> None:
                inner.limit = 0  # as if another thread had taken all of it

        with pool.hook(Greedy()), pytest.raises(OutOfMemoryError):
            pool.allocate(100)
        assert (outer.used, inner.used) == (0, 0)


def test_entered_twice(pool: Pool) -> None:
    budget = pool.budget(KIB)
    with budget:
        _x = pool.allocate(1)
        with pytest.raises(RuntimeError, match="is open"), budget:
            pass
        with pytest.raises(OutOfMemoryError):
            pool.allocate(KIB)
    with budget:  # entering it again is allowed; it keeps counting
        assert budget.used == 512
        with pytest.raises(OutOfMemoryError):
            pool.allocate(KIB)


class TestOnExceed:
    def test_drops_something(self, pool: Pool) -> None:
        held: list[Any] = []
        asked = []

        def drop(budget: Budget, nbytes: int) -> bool:
            asked.append((budget.used, nbytes))
            if held:
                held.pop()
                return True
            return False

        with pool.budget(4 * KIB, on_exceed=drop):
            held += [pool.allocate(KIB) for _ in range(4)]
            _x = pool.allocate(2000)
            assert asked == [(4 * KIB, 2000), (3 * KIB, 2000)]
            assert len(held) == 2
            with pytest.raises(OutOfMemoryError):
                pool.allocate(4 * KIB)
            assert not held

    def test_raises(self, pool: Pool) -> None:
        def fail(budget: Budget, nbytes: int) -> bool:
            raise KeyError(nbytes)

        with pool.budget(0, on_exceed=fail) as budget, pytest.raises(KeyError):
            pool.allocate(7)
        assert budget.used == 0

    def test_may_use_another_pool(self, pool: Pool) -> None:
        """The callback may, for example, copy what it drops to another pool."""
        other, held, saved = Pool(driver=FaultyDriver()), [], []

        def swap(budget: Budget, nbytes: int) -> bool:
            x = held.pop()
            saved.append(other.empty_like(x).copy_(x))
            return True

        with pool.budget(8 * KIB, on_exceed=swap):
            for i in range(10):
                held.append(pool.full(1000, float(i)))
        assert len(held) + len(saved) == 10
        assert len(held) == 2
        held.clear()  # the budget refers to this list, and the tensors to the budget


def test_cycles_are_collected(pool: Pool) -> None:
    with without_collections(), pool.budget(64 * KIB):
        for _ in range(50):
            cycle: list[Any] = [pool.allocate(10 * KIB)]
            cycle.append(cycle)
            del cycle


def test_other_threads_are_charged_in_a_copy_of_the_context_alone(pool: Pool) -> None:
    held: list[Any] = []
    with pool.budget(KIB) as budget:
        in_threads(lambda: held.append(pool.allocate(MIB)), count=1)
        assert len(held) == 1
        assert budget.used == 0
        copy = contextvars.copy_context()
        in_threads(copy.run, lambda: held.append(pool.allocate(1)))
        assert budget.used == 512
    held.clear()
    assert budget.used == 0


def test_many_threads_of_one_budget(
    pool: Pool, driver: FaultyDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "collect", lambda: 0)  # a refusal would visit all of torch
    limit = 40 * KIB

    def work(seed: int) -> None:
        choose, held = random.Random(seed), []
        for _ in range(2000):
            try:
                held.append(pool.allocate(choose.randrange(1, 8 * KIB)))
            except OutOfMemoryError:
                held.clear()
            assert budget._used <= limit
            if len(held) > 4:
                held.pop(0)

    with pool.budget(limit) as budget:
        copies = [(contextvars.copy_context(), SEED + i) for i in range(4)]
        in_threads(lambda copy: copy[0].run(work, copy[1]), *copies)
    assert budget.used == 0
    assert 0 < budget.peak <= limit


def test_finalizer_inside_the_pools_own_call(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    once_inside(monkeypatch, lambda: held.append(pool.allocate(3 * KIB)))
    with pool.budget(8 * KIB) as budget:
        x = pool.allocate(KIB)
        assert held[0].allocation.block is None  # comes from the driver
        assert budget.used == 4 * KIB
        held.clear()
        assert budget.used == KIB or held
        with pytest.raises(OutOfMemoryError):
            pool.allocate(8 * KIB)
    del x
    held.clear()
    assert budget.used == 0


def test_unpickled_tensors_are_not_charged(pool: Pool) -> None:
    with pool.budget(KIB) as budget:
        x = pool.full(10, 1.0)
        y = pickle.loads(pickle.dumps(x))
        assert torch.equal(x, y)
        assert budget.used == 512


def test_repr(pool: Pool) -> None:
    budget = pool.budget("1MiB", "scratch")
    assert repr(budget) == "<the budget 'scratch' of 1 MiB: 0 B in use>"
