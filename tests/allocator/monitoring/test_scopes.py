"""Statistics of a block of code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

import allocator
from allocator import Pool, Usage, statistics
from allocator.monitoring import scopes
from allocator.monitoring.scopes import Scope
from allocator.pool.core import Core
from tests.interrupts import Condition, at, at_call_from, stopping_at
from tests.running import in_threads


@pytest.fixture(autouse=True)
def _no_records() -> Iterator[None]:
    allocator.reset_statistics_report()
    yield
    allocator.reset_statistics_report()


def test_a_loop_counts_every_tensor(pool: Pool) -> None:
    for _ in range(10):  # after this, the cache could hand them out uncounted
        pool.empty(100)
    with statistics() as scope:
        for _ in range(50):
            pool.empty(100)
    assert scope.usage == Usage(0, 512, 50 * 512, 0, 1, 50)
    assert scope.name == "test_a_loop_counts_every_tensor"
    assert not pool._core.bypasses_cache


def test_by_pool(pool: Pool) -> None:
    with statistics() as scope:
        other = Pool("cpu", name="other")
        x = pool.empty(100)
        _y = other.empty(200)
        del x
    assert scope.pools == {
        pool.name: Usage(0, 512, 512, 0, 1, 1),
        "other": Usage(1024, 1024, 1024, 1, 1, 1),
    }
    assert scope.usage == Usage(1024, 1536, 1536, 1, 2, 2)


def test_repr(pool: Pool) -> None:
    with statistics("part") as scope:
        _x = pool.empty(100)
        pool.empty(1000)
    assert (
        repr(scope) == "<statistics 'part': 512 B now, at most 4.5 KiB, 4.5 KiB in 2 allocations>"
    )


def test_nested(pool: Pool) -> None:
    with statistics("outer") as outer:
        x = pool.empty(100)
        with statistics("inner") as inner:
            y = pool.empty(100)
            del x  # was not counted by the inner scope
        del y
    assert inner.usage == Usage(512, 512, 512, 1, 1, 1)
    assert outer.usage == Usage(0, 1024, 1024, 0, 2, 2)


def test_only_the_block_is_counted(pool: Pool) -> None:
    before = pool.empty(100)
    with statistics() as scope:
        del before
        assert scope.usage == Usage(0, 0, 0, 0, 0, 0)
        for _ in range(2):
            x = pool.empty(100)
            assert scope.usage.current_bytes == 512
            del x
            assert scope.usage.current_bytes == 0
        x = pool.empty(100)
    usage = scope.usage
    del x
    pool.empty(100)
    assert scope.usage == usage == Usage(512, 512, 1536, 1, 1, 3)


def test_threads_are_separate(pool: Pool) -> None:
    barrier = threading.Barrier(4)
    found: dict[int, Usage] = {}

    def work(count: int) -> None:
        barrier.wait()
        with statistics() as scope:
            barrier.wait()
            for _ in range(count):
                pool.empty(100)
            barrier.wait()
        found[count] = scope.usage

    in_threads(work, 50, 100, 150, 200)
    for count, usage in found.items():
        assert (usage.total_count, usage.total_bytes) == (count, 512 * count)
        assert usage.current_count == 0
    assert len(found) == 4


def test_another_thread_releases(pool: Pool) -> None:
    with statistics() as scope:
        in_threads(list.clear, [pool.empty(100)])
        assert scope.usage.current_count == 0


def test_tasks_are_separate(pool: Pool) -> None:
    async def work(count: int) -> int:
        with statistics() as scope:
            for _ in range(count):
                pool.empty(100)
                await asyncio.sleep(0)
        return scope.usage.total_count

    async def both() -> list[int]:
        return list(await asyncio.gather(work(3), work(5)))

    assert asyncio.run(both()) == [3, 5]


def test_an_error_closes_the_scope(pool: Pool) -> None:
    with pytest.raises(KeyError), statistics("fails"):
        raise KeyError
    assert not pool._core.bypasses_cache
    assert "fails" in allocator.statistics_report()


@pytest.mark.parametrize(
    "place",
    [at(Core.add_hook, "return"), at_call_from(Scope.__exit__)],
    ids=["at the start", "at the end"],
)
def test_an_interrupt_closes_the_scope(pool: Pool, place: Condition) -> None:
    with pytest.raises(KeyboardInterrupt), stopping_at(place), statistics():
        pool.empty(100)
    assert not pool._core.bypasses_cache
    assert not Pool("cpu")._core.bypasses_cache  # nor do later pools know the scope
    assert not any(isinstance(hook, Scope) for core in scopes._cores for hook in core.hooks.all)
    assert scopes._entered.get() == ()


def test_report(pool: Pool) -> None:
    for n in (100, 1000):
        with statistics("step"):
            pool.empty(n)
    with statistics("large"):
        pool.empty(1 << 20)
    header, first, second = allocator.statistics_report().splitlines()
    assert header.split() == ["calls", "peak", "total", "name,", "place"]
    assert first.split()[0] == "1"
    assert "large, test_scopes.py:" in first
    assert second.split()[:5] == ["2", "4", "KiB", "4.5", "KiB"]
    assert second.endswith("(test_report)")
    allocator.reset_statistics_report()
    assert len(allocator.statistics_report().splitlines()) == 1


def test_a_scope_is_entered_once() -> None:
    with statistics() as scope:
        pass
    with pytest.raises(RuntimeError, match="entered only once"), scope:
        pass
