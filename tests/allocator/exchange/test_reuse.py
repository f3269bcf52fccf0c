"""The reuse cache hands released tensors out only for their own shape and dtype."""

from __future__ import annotations

import random

import pytest
import torch

from allocator import Pool
from tests.allocator.helpers import check_cache
from tests.conftest import SEED

FEW = ((1000, torch.float32), ((40, 25), torch.float32), (1000, torch.int64), (7, torch.float32))


def test_one_given_twice_is_not_kept_for_its_old_shape() -> None:
    """A tensor is released, reused and released again while eight others are ready."""
    pool = Pool("cpu")
    others = [pool.empty(1000) for _ in range(8)]
    x = pool.empty(1000)
    del x
    pool.tally()
    x = pool.empty(1000)
    del others
    pool.tally()
    del x
    pool.tally()
    small = pool.empty(100)
    del small
    assert pool.empty(1000).shape == (1000,)


@pytest.mark.parametrize("most_held", [3, 12, 60])
def test_few_shapes_in_any_order(most_held: int) -> None:
    """The pool is rarely queried, so that released tensors wait in every possible state."""
    pool, choose = Pool("cpu"), random.Random(SEED + most_held)
    held: list[tuple[torch.Tensor, int]] = []
    level = 0
    for step in range(20_000):
        if len(held) == level:
            level = choose.randrange(most_held)
        if len(held) < level:
            shape, dtype = choose.choice(FEW)
            x = pool.empty(shape, dtype)
            assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
            assert x.dtype == dtype
            mark = step % 10_000
            held.append((x.fill_(mark), mark))
            del x
        elif held:
            x, mark = held.pop(choose.randrange(len(held)))
            assert (x == mark).all()
            del x
        if choose.random() < 0.02:
            choose.choice([pool.tally, pool.empty_cache, lambda: pool.allocate(100)])()
        check_cache(pool)
    held.clear()
    assert pool.memory_allocated() == 0
