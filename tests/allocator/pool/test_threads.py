"""Many threads use a pool at once, and pass its memory from thread to thread."""

from __future__ import annotations

import ctypes
import queue
import random
from typing import Any

import pytest
import torch

from allocator import Pool
from tests.conftest import SEED
from tests.running import in_threads

THREADS = 8
ALLOCATIONS = 50_000  # of all threads
MOST_HELD = 24
SIZES = (*[8, 24, 64, 100, 256, 1000] * 8, 3000, 9000, 20_000, 100_000)  # in elements


class Marked:
    """A tensor or memory whose first and last element are marked."""

    def __init__(self, keeper: Any, size: int, mark: int) -> None:
        address = keeper.data_ptr() if torch.is_tensor(keeper) else keeper.address
        self.keeper, self.mark = keeper, mark
        self.ends = [ctypes.c_int64.from_address(address + 8 * i) for i in (0, size - 1)]
        for end in self.ends:
            end.value = mark

    def release(self) -> None:
        assert [end.value for end in self.ends] == [self.mark] * 2
        if not torch.is_tensor(self.keeper):
            self.keeper.release()


@pytest.mark.usefixtures("_many_switches")
def test_tensors_and_memory_in_many_threads() -> None:
    """Each allocation is checked and released by the thread that made it, or by another one."""
    pool = Pool("cpu")
    handed: list[queue.SimpleQueue[Marked]] = [queue.SimpleQueue() for _ in range(THREADS)]

    def work(number: int) -> None:
        rng, mine = random.Random(SEED + number), handed[number]
        held: list[Marked] = []
        for i in range(ALLOCATIONS // THREADS):
            size = rng.choice(SIZES)
            if rng.random() < 0.05:
                keeper: Any = pool.allocate(8 * size)
            else:
                keeper = pool.empty(size, torch.int64)
                assert keeper.shape == (size,)
            item = Marked(keeper, size, THREADS * i + number)
            if rng.random() < 0.1:
                rng.choice(handed).put(item)
            else:
                held.append(item)
            del keeper, item
            while len(held) > MOST_HELD or (held and rng.random() < 0.4):
                held.pop(rng.randrange(len(held))).release()
            while not mine.empty():
                mine.get().release()
        for item in held:
            item.release()

    in_threads(work, *range(THREADS))
    for left in handed:
        while not left.empty():
            left.get().release()
    levels = pool.tally().levels
    assert levels["allocation"][0].allocated == levels["allocation"][0].freed == ALLOCATIONS
    assert all(levels[name][0].current == 0 for name in ("allocation", "active", "allocated_bytes"))
    assert pool.memory_allocated() == 0
    pool.close()
    assert pool.memory_reserved() == 0
