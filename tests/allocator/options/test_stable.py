"""Stable addresses: the same calls get the same offsets, whatever else the process did."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest
import torch

from allocator import Hook, OutOfMemoryError, Pool, Rules
from tests.allocator.helpers import (
    MIB,
    AligningDriver,
    FaultyDriver,
    OtherQueue,
    check,
    once_inside,
)
from tests.conftest import SEED
from tests.running import check_script

ARENA = 64 * MIB


@pytest.fixture
def driver() -> AligningDriver:
    return AligningDriver()


@pytest.fixture
def pool(driver: AligningDriver) -> Pool:
    return Pool(driver=driver, name="mine", stable_addresses=ARENA)


def walk(
    pool: Pool, steps: int, seed: int = SEED, collect: Callable[[], object] = lambda: None
) -> list[int]:
    """Return the offsets of a random sequence of calls; ``collect`` is called at each release."""
    choose, held, offsets = random.Random(seed), [], []
    for _ in range(steps):
        nbytes = choose.choice([1, 100, 5000, 70_000, 3 * MIB, choose.randrange(1, MIB)])
        make = choose.randrange(5)
        if make == 0:
            held.append(pool.allocate(nbytes, alignment=choose.choice([512, 4096, 2 * MIB])))
        elif make == 1:
            held.append(pool.array(nbytes, "uint8"))
        else:
            held.append(pool.empty(nbytes, torch.uint8))
        offsets.append(pool.offset_of(held[-1]))
        while len(held) > 8 or (held and choose.random() < 0.3):
            held.pop(choose.randrange(len(held)))
            collect()
        if choose.random() < 0.02:
            with pool.reserve(MIB):
                held.append(pool.full(1000, 1.0))
                offsets.append(pool.offset_of(held[-1]))
        if choose.random() < 0.02:
            pool.trim()
    return offsets


def test_arena(pool: Pool, driver: AligningDriver) -> None:
    assert pool.memory_reserved() == driver.reserved == ARENA
    assert driver.calls == 1
    x, y = pool.full(1000, 1.0), pool.full((100, 100), 2.0)
    assert (pool.offset_of(x), pool.offset_of(y)) == (0, 4096)
    assert pool.offset_of(y[10:]) == 4096
    assert pool.offset_of(pool.array(10)) == 4096 + 40448
    pool.trim()
    pool.empty_cache()
    assert driver.reserved == ARENA
    check(pool, driver)
    del x, y
    pool.close()
    assert driver.reserved == 0


def test_all_of_it_can_be_given(pool: Pool, driver: AligningDriver) -> None:
    whole = pool.allocate(ARENA)
    assert pool.offset_of(whole) == 0
    with pytest.raises(OutOfMemoryError, match="arena of 64 MiB is exhausted"):
        pool.allocate(1)
    assert driver.calls == 1
    whole.release()
    kept = [pool.allocate(512) for _ in range(ARENA // 512 // 64)]
    with pytest.raises(OutOfMemoryError):
        pool.allocate(ARENA - len(kept) * 512 + 1)
    pool.allocate(ARENA - len(kept) * 512)
    check(pool, driver)


def test_size_is_rounded_up(driver: AligningDriver) -> None:
    smallest = Pool(driver=driver, stable_addresses=1)
    assert smallest.memory_reserved() == driver.reserved == 2 * MIB
    pool = Pool(driver=AligningDriver(), stable_addresses="3MiB")
    assert pool.memory_reserved() == 4 * MIB


def test_the_same_calls_find_the_same_offsets(driver: AligningDriver) -> None:
    first = walk(Pool(driver=driver, stable_addresses=ARENA), 400)
    assert len(set(first)) > 50
    assert walk(Pool(driver=AligningDriver(), stable_addresses=ARENA), 400) == first
    assert walk(Pool(driver=AligningDriver(), stable_addresses=ARENA), 400, SEED + 1) != first


def test_whatever_the_number_of_tensors(driver: AligningDriver) -> None:
    """Releases are seen at once even with more exports than one call usually checks."""
    pool = Pool(driver=driver, stable_addresses=2 * ARENA)
    _small = [pool.empty(1, torch.uint8) for _ in range(2000)]
    tensors = [pool.empty(1000) for _ in range(100)]
    offsets = [pool.offset_of(x) for x in tensors]
    for i in reversed(range(100)):
        del tensors[i]
        tensors.insert(i, pool.empty(1000))
    assert [pool.offset_of(x) for x in tensors] == offsets


def test_whatever_watches(driver: AligningDriver) -> None:
    expected = walk(Pool(driver=driver, stable_addresses=ARENA), 60)
    pool = Pool(driver=AligningDriver(), stable_addresses=ARENA)
    pool.record_history()
    with pool.hook(Hook()), pool.budget(ARENA), pool.record(), pool.timeline():
        assert walk(pool, 60, collect=gc.collect) == expected


def test_quarantine_is_stable_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order in which memory leaves quarantine does not depend on when releases are noticed."""
    monkeypatch.setattr("allocator.options.guard.QUARANTINE", 4 * MIB)
    pool = Pool(driver=AligningDriver(), stable_addresses=ARENA, debug=True)
    expected = walk(pool, 60)
    pool.check()
    pool = Pool(driver=AligningDriver(), stable_addresses=ARENA, debug=True)
    assert walk(pool, 60, collect=gc.collect) == expected


WALK = """
import gc, sys
from allocator import Pool
from tests.allocator.options.test_stable import ARENA, walk
junk = [bytearray(1000 + i) for i in range(1000)]
other = Pool("cpu")  # whose traces the next pool's machinery has
kept = [other.empty(n) for n in range(1, 300, 7)]
del kept[::3]
other.memory_allocated()
del other, kept
for thresholds in ([5, 5, 5], [0]):
    gc.set_threshold(*thresholds)
    print(walk(Pool("cpu", stable_addresses=ARENA), 300, int(sys.argv[1])))
"""


def test_in_another_process() -> None:
    """Device memory gets the same offsets there, although garbage is collected at other moments."""
    expected = walk(Pool("cpu", stable_addresses=ARENA), 300)
    assert check_script(WALK, str(SEED), PYTHONHASHSEED="7") == f"{expected}\n" * 2


def test_record_queue_waits(driver: AligningDriver) -> None:
    """A release does not depend on another queue's progress."""

    class Queue:
        waited = 0

        def submit_barrier(self) -> None:
            raise AssertionError("polled")

        def wait(self) -> None:
            self.waited += 1

    pool, queue = Pool(driver=driver, stable_addresses=ARENA), Queue()
    x = pool.full(1000, 1.0)
    pool.record_queue(x, queue)
    del x
    assert pool.offset_of(pool.empty(1000)) == 0
    assert queue.waited == 1


def test_memory_for_another_queue(pool: Pool, driver: AligningDriver) -> None:
    with pytest.raises(ValueError, match="serves its own queue alone"):
        pool.allocate(100, queue=OtherQueue())
    assert pool.offset_of(pool.allocate(100)) == 0
    check(pool, driver)


def test_set_limit(pool: Pool) -> None:
    for options in ({"limit": MIB}, {"fraction": 0.5}):
        with pytest.raises(ValueError, match="stable_addresses"):
            pool.set_limit(**options)
    pool.set_limit(None)
    assert pool.limit is None


def test_rules_of_ones_own(driver: AligningDriver) -> None:
    rules = Rules(small_limit=MIB, small_segment=8 * MIB, over_reserve=1.0, slack=16 * MIB)
    pool = Pool(driver=driver, stable_addresses=ARENA, rules=rules)
    walk(pool, 100)
    assert driver.calls == 1
    assert driver.reserved == ARENA


def test_no_room_for_the_arena(driver: AligningDriver) -> None:
    driver.fails = lambda *_: True
    with pytest.raises(OutOfMemoryError, match=r"mine has no room for 64 MiB: .*told to fail"):
        Pool(driver=driver, name="mine", stable_addresses=ARENA)


def test_driver_that_does_not_align(driver: AligningDriver) -> None:
    driver.shift = 512
    with pytest.raises(RuntimeError, match="not aligned to 2 MiB"):
        Pool(driver=driver, stable_addresses=ARENA)
    assert driver.reserved == 0


def test_offset_of_what_has_none(pool: Pool) -> None:
    other = Pool(driver=FaultyDriver())
    for memory in (other.empty(8), torch.empty(8), pool.allocate(0), pool.empty(0)):
        with pytest.raises(ValueError, match=r"not belong to mine|no bytes"):
            pool.offset_of(memory)
    with pytest.raises(ValueError, match="no stable addresses"):
        other.offset_of(other.empty(8))
    with pytest.raises(TypeError):
        pool.offset_of(3)


def test_finalizer_inside_the_pools_own_call(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The finalizer's request is refused: nothing more is taken from the driver."""
    refused = []

    def allocate() -> None:
        with pytest.raises(OutOfMemoryError, match="a finalizer or a signal handler"):
            pool.allocate(100)
        refused.append(True)

    once_inside(monkeypatch, allocate)
    assert pool.offset_of(pool.allocate(100)) == 0
    assert refused


def test_closed_with_something_in_use(pool: Pool, driver: AligningDriver) -> None:
    x = pool.full(1000, 1.0)
    pool.close(force=True)
    assert driver.reserved == ARENA
    assert (x == 1).all()
    del x
    assert pool.memory_reserved() == driver.reserved == 0
