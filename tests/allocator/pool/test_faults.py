"""With a failing driver or a limit, the error names the reason and the pool stays usable."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from allocator import Hook, OutOfMemoryError, Pool
from tests.allocator.helpers import (
    KIB,
    MIB,
    DroppingDriver,
    FaultyDriver,
    OtherQueue,
    bytes_in_use,
    check,
)
from tests.garbage import without_collections


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("error", [MemoryError("told to fail"), RuntimeError("device lost")])
def test_every_nth_call_fails(n: int, error: Exception) -> None:
    """A MemoryError becomes an OutOfMemoryError; any other error passes through."""
    driver = FaultyDriver(lambda driver, _: driver.calls % n == 0)
    driver.error = error
    expected = OutOfMemoryError if isinstance(error, MemoryError) else RuntimeError
    pool = Pool(driver=driver)
    kept, failed = [], 0
    for i in range(60):
        try:
            kept.append((i, pool.full((300_000 if i % 2 else 5_000_000) + 100 * i, float(i))))
            kept.append((i, pool.full(10 + i, float(i))))
        except expected as caught:
            assert str(error) in str(caught)  # noqa: PT017
            failed += 1
        check(pool, driver)
        if i % 3 == 2:
            del kept[:3]
        if i % 10 == 9:
            pool.empty_cache()
    # A request fails only if the calls for the large and for the small segment both fail.
    assert failed > 0 if n == 1 or expected is RuntimeError else failed < 60
    driver.fails = lambda *_: False
    kept.append((77, pool.full(10 * MIB, 77.0)))
    assert all((x == i).all() for i, x in kept)
    check(pool, driver)
    kept.clear()
    pool.close()
    assert not driver.held


def test_every_call_fails() -> None:
    driver = FaultyDriver(lambda *_: True)
    pool = Pool(driver=driver, name="mine")
    for nbytes in (1, 1000, 10 * MIB):
        with pytest.raises(OutOfMemoryError, match=r"mine has no room.*told to fail") as caught:
            pool.allocate(nbytes)
        assert caught.value.requested == nbytes
        assert (caught.value.live, caught.value.reserved) == (0, 0)
        check(pool, driver)
    driver.fails = lambda *_: False
    assert (pool.full(1000, 3.0) == 3).all()
    check(pool, driver)


def test_fails_after_so_many_bytes() -> None:
    driver = FaultyDriver(lambda driver, nbytes: driver.reserved + nbytes > 20 * MIB)
    pool = Pool(driver=driver)
    kept = []
    for _round in range(3):
        with pytest.raises(OutOfMemoryError) as caught:  # noqa: PT012
            while True:
                kept.append(pool.allocate(MIB))
                check(pool, driver)
        assert caught.value.live == bytes_in_use(pool)
        assert 18 <= len(kept) <= 20
        del kept[5:]
        kept += [pool.allocate(MIB) for _ in range(10)]
        check(pool, driver)
    kept.clear()
    pool.close()
    assert not driver.held


def test_error_has_all_that_its_message_says() -> None:
    driver = FaultyDriver()
    pool = Pool(driver=driver, name="mine", limit="4MiB")
    _held = pool.allocate(1000), pool.allocate(MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.allocate(8 * MIB)
    error = caught.value
    assert (error.requested, error.pool, error.limit) == (8 * MIB, "mine", 4 * MIB)
    assert error.live == pool.memory_allocated() == bytes_in_use(pool)
    assert error.reserved == pool.memory_reserved()
    assert 0 < error.largest_free <= error.reserved - error.live
    assert error.fragmentation == pytest.approx(
        1 - error.largest_free / (error.reserved - error.live)
    )
    assert sum(site.nbytes for site in error.sites) == error.live
    assert sum(site.blocks for site in error.sites) == 2
    assert "limit" in error.reason
    for part in ("mine", "8", "4", error.reason, error.sites[0].where):
        assert part in str(error)
    assert isinstance(error, MemoryError)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_error_can_be_pickled(protocol: int) -> None:
    pool = Pool(driver=FaultyDriver(), limit=3 * MIB)
    _held = pool.allocate(100)
    with pytest.raises(OutOfMemoryError) as caught:
        pool.empty(10 * MIB)
    restored = pickle.loads(pickle.dumps(caught.value, protocol))
    assert type(restored) is OutOfMemoryError
    assert vars(restored) == vars(caught.value)
    assert str(restored) == str(caught.value)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_error_keeps_what_was_added(copied: Callable[[Any], Any]) -> None:
    """Code that catches an error may add a note or an attribute, and raise it further."""
    with pytest.raises(OutOfMemoryError) as caught:
        Pool(driver=FaultyDriver(), limit=MIB).empty(MIB)
    vars(caught.value)["__notes__"] = ["rank 3"]  # as add_note does, from Python 3.11 on
    vars(caught.value)["rank"] = 3
    restored = copied(caught.value)
    assert (restored.__notes__, restored.rank) == (["rank 3"], 3)
    assert vars(restored) == vars(caught.value)


@pytest.mark.parametrize("size", [100, MIB])
def test_cycles_are_collected_before_the_error(size: int) -> None:
    pool = Pool(driver=FaultyDriver(), limit="8MiB")
    with without_collections():
        for _ in range(3 * 8 * MIB // max(4 * size, 64 * KIB)):
            cycle: list[Any] = [pool.full(size if size > 100 else 16 * KIB, 1.0)]
            cycle.append(cycle)
            del cycle
        gc.collect()
    assert pool.memory_allocated() == 0


class Dropping(Hook):
    def __init__(self, held: list[Any]) -> None:
        self.held = held
        self.asked: list[int] = []

    def out_of_memory(self, pool: Pool, nbytes: int) -> bool:
        self.asked.append(nbytes)
        if not self.held:
            return False
        self.held.pop()
        return True


def test_hook_is_asked() -> None:
    driver = FaultyDriver()
    pool = Pool(driver=driver, limit="8MiB")
    held = [pool.allocate(2 * MIB - 4 * KIB) for _ in range(4)]
    with pool.hook(Dropping(held)) as hook:
        big = pool.allocate(5 * MIB)
        assert hook.asked == [5 * MIB] * len(hook.asked)
        assert len(held) == 4 - len(hook.asked) < 3
        with pytest.raises(OutOfMemoryError):
            pool.allocate(9 * MIB)
        assert not held
        assert hook.asked[-1] == 9 * MIB
    check(pool, driver)
    with pytest.raises(OutOfMemoryError):  # the hook is no longer asked
        pool.allocate(8 * MIB)
    assert hook.asked[-1] == 9 * MIB
    del big
    pool.allocate(7 * MIB)


def test_error_of_the_hook_passes_through() -> None:
    class Failing(Hook):
        def out_of_memory(self, pool: Pool, nbytes: int) -> bool:
            raise KeyError(nbytes)

    driver = FaultyDriver()
    pool = Pool(driver=driver, limit=MIB)
    with pool.hook(Failing()), pytest.raises(KeyError):
        pool.allocate(2 * MIB)
    pool.set_limit(None)
    assert (pool.full(1000, 1.0) == 1).all()
    check(pool, driver)


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"limit": 4096}, 4096),
        ({"limit": "2KiB"}, 2 * KIB),
        ({"limit": 0}, 0),
        ({"fraction": 0.25}, 25 * MIB),
        ({}, None),
    ],
)
def test_limits(options: dict[str, Any], limit: int | None) -> None:
    pool = Pool(driver=FaultyDriver(), **options)
    assert pool.limit == limit
    other = Pool(driver=FaultyDriver())
    other.set_limit(**options)
    assert other.limit == limit
    if limit is not None:
        with pytest.raises(OutOfMemoryError, match="limit"):
            pool.allocate(limit + 1)


def test_limit_below_what_is_in_use(pool: Pool) -> None:
    kept = [pool.full(MIB, float(i)) for i in range(8)]
    pool.set_limit("16MiB")
    with pytest.raises(OutOfMemoryError):  # noqa: PT012
        for _ in range(20):
            kept.append(pool.full(MIB, 8.0))
    assert all((x == float(min(i, 8))).all() for i, x in enumerate(kept))
    kept.clear()
    assert (pool.full(3 * MIB, 1.0) == 1).all()


def test_memory_of_another_queue_makes_room() -> None:
    driver = FaultyDriver()
    pool = Pool(driver=driver, limit=16 * MIB)
    pool.allocate(10 * MIB).release()
    assert pool.allocate(10 * MIB, queue=OtherQueue()).nbytes == 10 * MIB
    check(pool, driver)


def test_limit_of_nothing_while_memory_is_in_use(pool: Pool, driver: FaultyDriver) -> None:
    kept = [pool.empty(1000), pool.empty(1000), pool.allocate(3 * MIB)]
    pool.set_limit(0)
    for ask in (lambda: pool.empty(1000), lambda: pool.empty(7), lambda: pool.allocate(1)):
        with pytest.raises(OutOfMemoryError, match="the limit of 0 B"):
            ask()
    kept.pop(0)  # not even in the place of a released tensor
    with pytest.raises(OutOfMemoryError):
        pool.empty(1000)
    kept.clear()
    pool.set_limit("2MiB")
    assert (pool.full(1000, 3.0) == 3).all()
    assert pool.memory_reserved() == driver.reserved == 2 * MIB


def test_segments_go_at_once() -> None:
    """Segments are freed without a collection, although they and their blocks form cycles."""
    driver = DroppingDriver()
    pool = Pool(driver=driver)
    with without_collections():
        for _ in range(3):
            pool.empty(MIB)
            assert driver.handles
            pool.empty_cache()
            assert not driver.handles
        pool.empty(MIB)
        assert pool.memory_allocated() == 0  # collects released tensors, which keep the pool
        del pool
        assert not driver.handles


def test_hits_are_counted_beside_reservations() -> None:
    pool = Pool(driver=FaultyDriver())
    for _ in range(5):
        with pool.reserve(4 * MIB):
            pass
        pool.empty_cache()
    pool.allocate(1000).release()
    pool.allocate(1000).release()
    assert pool.health().hit_rate == 0.5


def test_small_tensors_of_a_reservation_count_as_others() -> None:
    def allocated(pool: Pool) -> int:
        for _ in range(100):
            pool.empty(100)
        return int(pool.memory_stats()["allocated_bytes.all.allocated"])

    pool, other = Pool(driver=FaultyDriver()), Pool(driver=FaultyDriver())
    with pool.reserve(MIB):
        assert allocated(pool) == allocated(other) == 51_200
