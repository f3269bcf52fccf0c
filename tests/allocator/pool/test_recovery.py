"""Interrupts at the worst places: no memory is handed out twice, and none is lost."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Iterator

import pytest
import torch

import allocator
from allocator import Pool
from allocator.exchange.exports import Exporter
from allocator.exchange.reuse import ReuseCache
from allocator.exchange.tensors import TensorFactory
from allocator.pool.core import Core
from tests.allocator.helpers import OtherQueue, bytes_in_use, check_cache
from tests.interrupts import InterruptAt, at, at_call_from, at_line, interrupted, stopping_at
from tests.running import in_threads

MANY = 1400  # exports, more than a quick check covers
SHAPES = (1000, 100, 64, (10, 10), (40, 25), 2000, 200_000)


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool that must be empty when the test ends."""
    pool = Pool("cpu")
    yield pool
    assert pool.memory_allocated() == 0
    check_cache(pool)
    pool.close()
    assert pool.memory_reserved() == 0


def check_apart(*tensors: torch.Tensor) -> None:
    """Check that no two tensors share memory."""
    for i, x in enumerate(tensors):
        x.fill_(i)
    assert all((x == i).all() for i, x in enumerate(tensors))


def test_lost_export_among_many(pool: Pool) -> None:
    """A tensor whose release went unnoticed is not handed out before it is in the records."""
    _keep = [pool.empty(10) for _ in range(MANY)]
    x = pool.empty(1000)
    del x
    with pytest.raises(KeyboardInterrupt), stopping_at(at(Exporter.take_released, "return")):
        pool.tally()
    _memory = pool.allocate(100)  # repairs the records, and checks only some exports
    x = pool.empty(1000)
    pool.tally()
    check_apart(x, pool.empty(1000), pool.empty((10, 100)))


def test_block_that_was_freed_twice_among_many(pool: Pool) -> None:
    """Memory that has a new owner by then stays in the records."""
    _keep = [pool.empty(10) for _ in range(MANY)]
    x = pool.empty(1000)
    address = x.data_ptr()
    del x
    pool.tally()
    with pytest.raises(KeyboardInterrupt), stopping_at(at(Exporter.reclaim, "call")):
        pool.empty_cache()
    taken = [pool.allocate(4000) for _ in range(2)]
    assert address in {memory.address for memory in taken}
    pool.tally()
    with pytest.raises(KeyboardInterrupt), stopping_at(at(Core.drain, "call")):
        pool.tally()
    addresses = {memory.address for memory in taken}
    assert not addresses & {pool.empty(1000).data_ptr(), pool.empty((10, 100)).data_ptr()}


class TestOtherQueues:
    """Memory used by another queue waits for that queue, whatever happens in between."""

    def test_interrupt_where_it_is_looked_at(self, pool: Pool) -> None:
        queue = OtherQueue()
        x = pool.empty(1000)
        pool.record_queue(x, queue)
        address = x.data_ptr()
        del x
        pool.tally()
        queue.error = KeyboardInterrupt
        with pytest.raises(KeyboardInterrupt):
            pool.tally()
        assert pool.empty(1000).data_ptr() != address
        queue.is_done = True
        pool.tally()

    @pytest.mark.parametrize("error", [RuntimeError, ValueError, KeyboardInterrupt])
    def test_no_barrier(self, pool: Pool, error: type[BaseException]) -> None:
        queue = OtherQueue(error=error)
        x = pool.empty(1000)
        others = [pool.empty(1000) for _ in range(3)]
        pool.record_queue(x, queue)
        address = x.data_ptr()
        del x, others
        with pytest.raises(error):
            pool.tally()
        kept = [pool.empty(1000) for _ in range(10)]
        assert address not in {x.data_ptr() for x in kept}
        del kept
        queue.is_done = True
        with contextlib.suppress(RuntimeError):
            pool.close()  # finds unclaimed memory, and asks again


def test_lock_is_released(pool: Pool) -> None:
    """The pool's lock is free after an interrupt at any call of drain_if_idle()."""
    array = pool.array(10)
    for n in range(4):
        stop = stopping_at(at_call_from(Core.drain_if_idle, n))
        with contextlib.suppress(KeyboardInterrupt), stop:
            torch.from_dlpack(array)
        in_threads(pool.tally, count=1)


def test_public_capsule(pool: Pool) -> None:
    """An unused capsule's memory is released, even if the detection of this is interrupted."""
    array = pool.array(10)
    capsule = array.__dlpack__(max_version=(1, 0))
    del capsule, array
    for _ in range(6):
        stop = stopping_at(at_call_from(Exporter.take_released))
        with contextlib.suppress(KeyboardInterrupt), stop:
            pool.tally()


def test_cache_entry_that_was_not_finished() -> None:
    """Memory cached in such an entry is freed by empty_cache()."""
    code = ReuseCache.entry_for.__code__
    for line in sorted({line for _, _, line in code.co_lines() if line})[1:]:
        pool = Pool("cpu")
        stop = stopping_at(at_line(ReuseCache.entry_for, line))
        with contextlib.suppress(KeyboardInterrupt), stop:
            pool.empty(1000)
        kept = [pool.empty(1000) for _ in range(8)]
        del kept
        pool.empty_cache()
        pool.close()
        assert pool.memory_reserved() == 0


def test_threads_between_two_lines(pool: Pool) -> None:
    """While a debugger holds a thread there, others reuse the export that it was checking."""
    x = pool.empty(1000)
    del x

    def meanwhile() -> None:
        first = pool.empty(1000)
        others = [pool.empty(1000) for _ in range(8)]
        del others
        pool.tally()
        del first  # its entry has cached enough already
        pool.tally()
        small = [pool.empty(100) for _ in range(20)]
        del small

    line = at_line(Pool.empty, "if words[first] not in NOT_RELEASED")
    with stopping_at(line, lambda: in_threads(meanwhile, count=1)):
        x = pool.empty(1000)
    assert x.shape == (1000,)


def test_flush_before_an_entry_is_looked_at(pool: Pool) -> None:
    """A tensor is counted even if its cache entry was cleared in the meantime."""
    held = [pool.empty(1000) for _ in range(4)]

    def meanwhile() -> None:
        pool.empty_cache()
        held.pop(0)

    with stopping_at(at(TensorFactory.another, "call"), meanwhile):
        held.append(pool.empty(1000))
    assert pool.memory_stats()["allocation.all.allocated"] == 5
    held.clear()


def test_close_inside_the_pools_own_work(pool: Pool) -> None:
    """A signal handler may close the pool there."""
    for n in (1000, 500, 1000):
        x = pool.empty(n)
        del x
    with pool._core.lock, pool._core.reentrancy:
        (lambda: pool.close(force=True))()
    with pytest.raises(RuntimeError, match="was closed"):
        pool.empty(1000)
    pool.tally()


def a_little_of_all(pool: Pool) -> None:
    """Make, release and reuse tensors, arrays and bytes of the pool."""
    tensors = [pool.empty(n) for n in (1000, 1000, 100, 300_000)]
    del tensors[1:]
    pool.tally()
    tensors += [pool.empty(1000), pool.empty(100)]
    array = pool.array(10)
    tensors.append(torch.from_dlpack(array))
    capsule = array.__dlpack__(max_version=(1, 0))
    del tensors[0], capsule
    pool.allocate(5000).release()
    x = pool.empty(1000)
    pool.record_queue(x, OtherQueue(is_done=True))
    del x
    pool.empty_cache()
    check_apart(*[pool.empty(n) for n in (1000, 1000, 100)])


def test_an_interrupt_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt at the first line of every function of the package, wherever it is called from."""
    monkeypatch.setattr(sys, "unraisablehook", lambda error: None)  # interrupts in finalizers
    for n in itertools.count():
        pool = Pool("cpu")
        with InterruptAt(n, "calls", within=allocator) as interrupt:
            a_little_of_all(pool)
        pool._core.drain_if_idle(with_unclaimed=True)  # as after a collection of garbage
        assert pool.memory_allocated() == 0, n
        assert not pool._core.store.in_use, n
        check_cache(pool)
        check_apart(*[pool.empty(n) for n in (1000, 1000, 100)])
        pool.close()
        assert pool.memory_reserved() == 0, n
        if not interrupt.has_raised:
            break
    assert n > 300


@pytest.mark.parametrize("keep", [0, MANY])
def test_no_two_share_memory(pool: Pool, keep: int) -> None:
    """After a thousand interrupts, tensors of a few shapes in any order share no memory."""
    _kept = [pool.empty(3) for _ in range(keep)]
    held: dict[int, torch.Tensor] = {}
    steps = 0

    def step(choose: random.Random) -> None:
        nonlocal steps
        steps += 1
        shape = choose.choice(SHAPES)
        x = pool.empty(shape)
        assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
        held[steps] = x.fill_(steps)
        if len(held) > 40:
            mark = choose.choice(list(held))
            assert (held.pop(mark) == mark).all()
        if choose.random() < 0.05:
            for mark in list(held)[::2]:
                held.pop(mark, None)
        if choose.random() < 0.05:
            choose.choice([pool.tally, pool.empty_cache, lambda: pool.allocate(100)])()

    interrupted(step, count=1000, most=1.5e-3)
    assert len({x.data_ptr() for x in held.values()}) == len(held)
    held.clear()
    assert pool.memory_allocated() == bytes_in_use(pool) == 512 * keep
