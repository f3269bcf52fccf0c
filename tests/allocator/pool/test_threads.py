"""A pool that many threads use at once, and whose memory goes from thread to thread."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
from typing import Any

from allocator import Pool
from tests.conftest import SEED

THREADS = 8
OPERATIONS = 1_000_000
"""In all; an operation is an allocation or a release."""
MOST_HELD = 24
SIZES = (*[8, 24, 64, 100, 256, 1000] * 8, 3000, 9000, 20_000, 100_000)
"""In elements of 8 bytes."""


class Worker(threading.Thread):
    """Allocates, marks both ends, hands some to another thread, checks the marks, and releases."""

    def __init__(self, number: int, pool: Pool, handed: list[queue.SimpleQueue[Any]]) -> None:
        super().__init__()
        self.number = number
        self.pool = pool
        self.handed = handed
        self.random = random.Random(SEED + number)
        self.allocations = self.releases = self.mark = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work(OPERATIONS // THREADS // 2)
        except BaseException as error:  # for the main thread to raise
            self.error = error

    def work(self, count: int) -> None:
        import torch

        choose, mine = self.random.random, self.handed[self.number]
        held: list[Any] = []
        for _ in range(count):
            size = SIZES[int(choose() * len(SIZES))]
            if choose() < 0.05:
                keeper: Any = self.pool.allocate(8 * size)
            else:
                keeper = self.pool.empty(size, torch.int64)
                assert keeper.shape == (size,)
            held.append(self.marked(keeper, size))
            if choose() < 0.1:
                other = self.handed[int(choose() * THREADS)]
                other.put(held.pop())
            while len(held) > MOST_HELD or (held and choose() < 0.4):
                index = int(choose() * len(held))
                held[index], held[-1] = held[-1], held[index]
                self.release(held.pop())
            while not mine.empty():
                self.release(mine.get())
        while held:
            self.release(held.pop())

    def marked(self, keeper: Any, size: int) -> Any:
        self.allocations += 1
        self.mark += THREADS
        mark = self.mark + self.number
        address = keeper.data_ptr() if hasattr(keeper, "data_ptr") else keeper.address
        first = ctypes.c_int64.from_address(address)
        last = ctypes.c_int64.from_address(address + 8 * (size - 1))
        first.value = last.value = mark
        return keeper, first, last, mark

    def release(self, item: Any) -> None:
        keeper, first, last, mark = item
        assert first.value == mark
        assert last.value == mark
        self.releases += 1
        if hasattr(keeper, "release"):
            keeper.release()


def test_a_million_operations() -> None:
    pool = Pool("cpu")
    handed: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(THREADS)]
    workers = [Worker(number, pool, handed) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for worker in workers:
        if worker.error is not None:
            raise worker.error
    for worker, left in zip(workers, handed):
        while not left.empty():
            worker.release(left.get())
    allocations = sum(worker.allocations for worker in workers)
    assert allocations == sum(worker.releases for worker in workers) == OPERATIONS // 2
    levels = pool.tally().levels
    assert levels["allocation"][0].allocated == levels["allocation"][0].freed == allocations
    assert all(levels[name][0].current == 0 for name in ("allocation", "active", "allocated_bytes"))
    assert pool.memory_allocated() == 0
    pool.close()
    assert pool.memory_reserved() == 0
