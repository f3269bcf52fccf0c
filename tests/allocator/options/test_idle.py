"""Idle decay returns free memory after a while without any call, and nothing else."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable

import pytest

from allocator import Pool
from tests.allocator.helpers import MIB, DroppingDriver, FaultyDriver, actions, check
from tests.running import check_script, in_threads

LONG = 1000.0  # seconds, within which no thread checks


Look = Callable[..., None]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Run the periodic check of the pool's thread, as if ``after`` more seconds had passed."""
    now = 100.0

    def look(pool: Pool, after: float = 0) -> None:
        nonlocal now
        now += after
        assert pool._decay is not None
        pool._decay.check(pool._core)

    monkeypatch.setattr("allocator.options.idle.time.monotonic", lambda: now)
    return look


@pytest.fixture
def pool(driver: FaultyDriver) -> Pool:
    return Pool(driver=driver, idle_seconds=LONG)


def wait_until(is_so: Callable[[], bool], seconds: float = 20) -> None:
    end = time.perf_counter() + seconds
    while not is_so():
        assert time.perf_counter() < end, "waited in vain"
        time.sleep(0.01)


def thread_of(pool: Pool) -> threading.Thread:
    assert pool._decay is not None
    return pool._decay._thread


def test_with_nobody_calling(driver: FaultyDriver) -> None:
    pool = Pool(driver=driver, idle_seconds=0.1)
    kept, large = pool.full(8, 1.0), pool.empty(MIB)
    started, reserved = time.perf_counter(), driver.reserved
    del large
    wait_until(lambda: driver.reserved < reserved)
    assert time.perf_counter() - started > 0.05
    assert driver.reserved == 2 * MIB
    assert (kept == 1).all()
    del kept
    wait_until(lambda: driver.reserved == 0)
    check(pool, driver)
    assert (pool.full(1000, 2.0) == 2).all()
    wait_until(lambda: driver.reserved == 0)
    pool.close()


def test_after_the_time_and_not_before(pool: Pool, driver: FaultyDriver, look: Look) -> None:
    pool.empty(1000)
    pool.empty(MIB)
    reserved = driver.reserved
    look(pool)
    look(pool, after=LONG - 1)
    assert driver.reserved == reserved
    look(pool, after=1)
    assert driver.reserved == 0
    check(pool, driver)


def test_what_was_used_meanwhile_stays(pool: Pool, driver: FaultyDriver, look: Look) -> None:
    """Memory stays even if it is free at each check, as between the steps of a loop."""
    look(pool)
    for _ in range(10):
        pool.empty(1000)
        pool.allocate(3 * MIB)
        look(pool, after=LONG / 2)
        assert driver.reserved >= 5 * MIB
    look(pool, after=LONG - 1)
    assert driver.reserved >= 5 * MIB
    look(pool, after=LONG)
    assert driver.reserved == 0


def test_only_segments_that_were_not_needed(pool: Pool, driver: FaultyDriver, look: Look) -> None:
    large = pool.empty(MIB)
    small = pool.empty(8)
    reserved = driver.reserved
    del large
    look(pool)
    look(pool, after=LONG)
    assert driver.reserved == 2 * MIB < reserved
    assert (small.fill_(1) == 1).all()
    check(pool, driver)


def test_memory_goes_at_once(look: Look) -> None:
    """Nothing keeps the driver's handle after a trim or an idle check."""
    driver = DroppingDriver()
    pool = Pool(driver=driver, idle_seconds=LONG)
    pool.empty(100)
    look(pool)
    pool.trim()
    assert not driver.handles
    pool.empty(100)
    look(pool)
    look(pool, after=LONG)
    assert not driver.handles


def test_reservations_stay(pool: Pool, driver: FaultyDriver, look: Look) -> None:
    with pool.reserve(MIB) as reservation:
        for _ in range(3):
            look(pool, after=LONG)
        assert reservation.left == MIB
    look(pool, after=LONG)
    assert driver.reserved >= MIB
    look(pool, after=LONG)
    assert driver.reserved == 0


def test_hooks_are_told(pool: Pool, driver: FaultyDriver, look: Look) -> None:
    pool.record_history()
    pool.empty(8)
    look(pool)
    look(pool, after=LONG)
    assert actions(pool)[-1] == "segment_free"
    assert pool.memory_reserved() == 0


def test_no_look_while_another_thread_is_inside(
    pool: Pool, driver: FaultyDriver, look: Look
) -> None:
    pool.empty(8)
    with pool._core.lock:
        in_threads(look, pool)
    look(pool)
    with pool._core.lock, pool._core.reentrancy:
        look(pool, after=LONG)  # as a signal handler might
    assert driver.reserved
    look(pool)
    assert driver.reserved == 0


@pytest.mark.parametrize("is_closed", [True, False])
def test_thread_ends_with_the_pool(is_closed: bool) -> None:
    pool = Pool(driver=FaultyDriver(), idle_seconds=LONG)
    thread = thread_of(pool)
    pool.allocate(8).release()
    if is_closed:
        pool.close()
    else:
        del pool
    thread.join(10)
    assert not thread.is_alive()


def test_pools_that_come_and_go() -> None:
    threads = []
    for _ in range(50):
        pool = Pool(driver=FaultyDriver(), idle_seconds=0.001)
        threads.append(thread_of(pool))
        pool.empty(8)
        del pool
    gc.collect()
    wait_until(lambda: not any(thread.is_alive() for thread in threads))


def test_beside_threads_that_allocate(driver: FaultyDriver) -> None:
    pool = Pool(driver=driver, idle_seconds=0.001)

    def work() -> None:
        for i in range(300):
            x, y = pool.full(8, float(i)), pool.full(100_000, float(i))
            assert (x == i).all()
            assert (y == i).all()
            del x, y
            if i % 50 == 0:
                time.sleep(0.005)

    in_threads(work, count=3)
    wait_until(lambda: driver.reserved == 0)
    check(pool, driver)
    pool.close()


def test_longest_time() -> None:
    Pool(driver=FaultyDriver(), idle_seconds=sys.float_info.max).close()


def test_with_the_debug_mode(driver: FaultyDriver, look: Look) -> None:
    """Quarantined memory is kept, so that it can still be checked."""
    pool = Pool(driver=driver, idle_seconds=LONG, debug=True)
    pool.full(1000, 1.0)
    for _ in range(3):
        look(pool, after=LONG)
    assert driver.reserved
    pool.check()
    pool.trim()
    assert driver.reserved == 0


PREAMBLE = """
import atexit, faulthandler, os, sys, threading, time
from allocator import Pool
from tests.allocator.helpers import FaultyDriver
pool = Pool(driver=FaultyDriver(), idle_seconds=0.001)
"""


def test_fork() -> None:
    """The parent's pool and its thread keep working; the child has neither."""
    check_script(
        f"""{PREAMBLE}
held = pool.allocate(8)
for _ in range(10):
    child = os.fork()
    if child == 0:
        try:
            pool.allocate(8)
        except RuntimeError:
            sys.exit(threading.active_count() != 1)
        sys.exit(2)
    assert os.waitpid(child, 0)[1] == 0
assert pool.driver.reserved
del held
end = time.monotonic() + 20
while pool.driver.reserved and time.monotonic() < end:
    time.sleep(0.01)
assert pool.driver.reserved == 0
"""
    )


def test_exit() -> None:
    check_script(
        f"""{PREAMBLE}
faulthandler.dump_traceback_later(90, exit=True)
sys.held = [pool.allocate(8), Pool(driver=FaultyDriver(), idle_seconds=1e-4), pool]
atexit.register(lambda: pool.allocate(100))
assert threading.active_count() == 3
for _ in range(100):
    pool.allocate(100_000)
"""
    )


def test_decay_is_told_of_its_pool_alone() -> None:
    one, two = FaultyDriver(), FaultyDriver()
    pools = Pool(driver=one, idle_seconds=LONG), Pool(driver=two, idle_seconds=0.01)
    for pool in pools:
        pool.allocate(8)
    wait_until(lambda: two.reserved == 0)
    assert one.reserved
