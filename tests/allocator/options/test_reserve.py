"""Reservations: what was put aside is there, and goes back whatever happens in the block."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest

from allocator import OutOfMemoryError, Pool, Reservation
from tests.allocator.helpers import KIB, MIB, FaultyDriver, bytes_of_blocks, check, once_inside
from tests.conftest import SEED
from tests.interrupts import interrupted
from tests.running import in_fork, in_threads


def held_blocks(pool: Pool) -> int:
    """Bytes of blocks that are not free, though nothing is in use."""
    assert pool.memory_allocated() == 0
    pool._core.flush_cache()
    return bytes_of_blocks(pool)


def test_nothing_else_is_taken_from_the_driver(pool: Pool, driver: FaultyDriver) -> None:
    with pool.reserve("8MiB") as reservation:
        driver.fails = lambda *_: True
        pool.set_limit(1)
        kept = [pool.full(128 * KIB, float(i)) for i in range(16)]
        assert reservation.left == 0
        with pytest.raises(OutOfMemoryError):
            pool.allocate(20 * MIB)
        assert all((x == i).all() for i, x in enumerate(kept))
        check(pool, driver)
    assert pool.memory_allocated() == 8 * MIB
    assert all((x == i).all() for i, x in enumerate(kept))
    kept.clear()
    assert held_blocks(pool) == 0
    check(pool, driver)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 5000, 300_000])
def test_so_many_fit_exactly(pool: Pool, driver: FaultyDriver, size: int) -> None:
    count, room = 7, -(-size // 512) * 512
    with pool.reserve(count * room) as reservation:
        driver.fails = lambda *_: True
        pool.set_limit(1)
        kept = []
        for i in range(count):
            assert reservation.left == (count - i) * room
            kept.append(pool.allocate(size))
        assert reservation.left == 0
        assert len({memory.address for memory in kept}) == count


def test_others_get_nothing_of_it(pool: Pool, driver: FaultyDriver) -> None:
    held: list[Any] = []

    def take() -> None:
        with contextlib.suppress(OutOfMemoryError):
            while True:
                held.append(pool.allocate(100 * KIB))

    pool.set_limit("16MiB")
    with pool.reserve("8MiB") as reservation:
        in_threads(take, count=1)
        assert 60 < len(held) < 82
        assert reservation.left == 8 * MIB
        held.append(pool.allocate(8 * MIB - KIB))
        assert reservation.left == KIB
    check(pool, driver)


def test_the_rest_is_free_after_the_block(pool: Pool, driver: FaultyDriver) -> None:
    with pool.reserve("4MiB") as reservation:
        x = pool.full(1000, 1.0)
    assert reservation.left == 0
    assert pool.memory_allocated() == 4096
    calls = driver.calls
    y = pool.allocate(3 * MIB)
    assert driver.calls == calls
    assert (x == 1).all()
    del x, y
    assert held_blocks(pool) == 0
    pool.trim()
    assert driver.reserved == 0


def test_fails_at_the_start(pool: Pool, driver: FaultyDriver) -> None:
    pool.set_limit(MIB)
    reservation = pool.reserve("8MiB")
    with pytest.raises(OutOfMemoryError, match="mine has no room for 8 MiB"), reservation:
        pytest.fail("entered")
    assert reservation.left == 0
    assert not pool._core.store.holders
    pool.set_limit(None)
    assert held_blocks(pool) == 0
    with pytest.raises(RuntimeError, match="entered before"), reservation:
        pass
    check(pool, driver)


def test_zero_bytes(pool: Pool, driver: FaultyDriver) -> None:
    with pool.reserve(0) as reservation:
        assert reservation.left == driver.calls == 0
        x = pool.allocate(1)
    del x
    check(pool, driver)


@pytest.mark.parametrize(
    ("nbytes", "error"),
    [(-1, ValueError), ("lots", ValueError), (1.5, TypeError), (None, TypeError)],
)
def test_bad_arguments(pool: Pool, nbytes: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        pool.reserve(nbytes)


def test_nested(pool: Pool, driver: FaultyDriver) -> None:
    """The innermost gives first; then the outer ones."""
    with pool.reserve(8 * KIB) as outer:
        with pool.reserve(4 * KIB) as inner:
            driver.fails = lambda *_: True
            kept = [pool.allocate(3 * KIB)]
            assert (outer.left, inner.left) == (8 * KIB, KIB)
            kept.append(pool.allocate(2 * KIB))
            assert (outer.left, inner.left) == (6 * KIB, KIB)
        kept.append(pool.allocate(6 * KIB))
        assert (outer.left, inner.left) == (0, 0)
    kept.clear()
    assert held_blocks(pool) == 0


def test_blocks_that_end_in_another_order(pool: Pool) -> None:
    one, two = pool.reserve(4 * KIB), pool.reserve(8 * KIB)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    x = pool.allocate(KIB)
    assert (one.left, two.left) == (0, 7 * KIB)
    two.__exit__(None, None, None)
    del x
    assert held_blocks(pool) == 0


def test_two_pools(pool: Pool) -> None:
    other = Pool(driver=FaultyDriver())
    with pool.reserve(KIB) as one, other.reserve(KIB) as two:
        x, y = pool.allocate(KIB), other.allocate(KIB)
        assert (one.left, two.left) == (0, 0)
    del x, y


@pytest.mark.parametrize("alignment", [512, 4 * KIB, 64 * KIB])
def test_alignment(pool: Pool, alignment: int) -> None:
    with pool.reserve(MIB) as reservation:
        kept = [pool.allocate(100, alignment=alignment) for _ in range(4)]
        assert all(memory.address % alignment == 0 for memory in kept)
        assert MIB - 5 * alignment <= reservation.left <= MIB - 3 * alignment - 512
    kept.clear()
    assert held_blocks(pool) == 0


def test_a_released_part_is_not_put_aside_again(pool: Pool) -> None:
    with pool.reserve(64 * KIB) as reservation:
        pool.empty(KIB)
        assert reservation.left == 60 * KIB
        for _ in range(100):
            pool.empty(KIB)
        assert reservation.left == 60 * KIB  # the same memory, all the time
        assert pool.memory_allocated() == 0


def test_in_a_budget(pool: Pool) -> None:
    with pool.budget(4 * KIB) as budget, pool.reserve(64 * KIB) as reservation:
        x = pool.allocate(KIB)
        assert (budget.used, reservation.left) == (KIB, 63 * KIB)
        with pytest.raises(OutOfMemoryError, match="budget"):
            pool.allocate(4 * KIB)
        assert reservation.left == 63 * KIB
    del x


@pytest.mark.parametrize("error", [KeyError, OutOfMemoryError, KeyboardInterrupt, GeneratorExit])
def test_exception_in_the_block(pool: Pool, error: type[BaseException]) -> None:
    def fail() -> None:
        with pool.reserve(MIB):
            x = pool.allocate(100)
            if error is OutOfMemoryError:
                pool.set_limit(MIB)
                pool.allocate(20 * MIB)
            del x
            raise error

    with pytest.raises(error):
        fail()
    gc.collect()
    assert held_blocks(pool) == 0


def test_trim_and_the_last_try_leave_it(pool: Pool, driver: FaultyDriver) -> None:
    with pool.reserve("8MiB") as reservation:
        pool.trim()
        pool.empty_cache()
        driver.fails = lambda *_: True
        with pytest.raises(OutOfMemoryError):
            pool.allocate(20 * MIB)
        assert reservation.left == 8 * MIB
        x = pool.full(MIB, 1.0)
        assert reservation.left == 4 * MIB
        check(pool, driver)
    del x


def test_close(pool: Pool, driver: FaultyDriver) -> None:
    with pool.reserve(MIB) as reservation:
        with pytest.raises(RuntimeError, match="open reservations"):
            pool.close()
        x = pool.allocate(KIB)
        assert pool.is_usable
        del x
        pool.close(force=True)
        with pytest.raises(RuntimeError, match="closed"):
            pool.allocate(KIB)
        assert reservation.left > 0
    assert driver.reserved == 0


def test_error_of_the_driver_costs_no_reservation(pool: Pool, driver: FaultyDriver) -> None:
    """The pool mends its books after it."""
    with pool.reserve(MIB) as reservation:
        x = pool.allocate(KIB)
        driver.error, driver.fails = RuntimeError("device lost"), lambda *_: True
        with pytest.raises(RuntimeError, match="device lost"):
            pool.allocate(20 * MIB)
        assert reservation.left == MIB - KIB
        y = pool.full(1000, 1.0)
        assert reservation.left == MIB - KIB - 4096
        check(pool, driver)
    del x, y
    assert held_blocks(pool) == 0


def test_finalizer_inside_the_pools_own_call(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is collected there ends its block; one that begins there is refused."""

    def block() -> Iterator[None]:
        with pool.reserve(MIB):
            yield

    generator = block()
    next(generator)

    def collect() -> None:
        nonlocal generator
        generator = None  # type: ignore[assignment]
        with (
            pytest.raises(RuntimeError, match="in the middle of mine's own work"),
            pool.reserve(KIB),
        ):
            pytest.fail("entered")

    once_inside(monkeypatch, collect)
    x = contextvars.Context().run(pool.allocate, 3 * MIB)
    assert generator is None
    del x
    assert held_blocks(pool) == 0
    assert not pool._core.store.holders


def test_tasks(pool: Pool) -> None:
    async def own(nbytes: int) -> int:
        with pool.reserve(nbytes) as reservation:
            x = pool.allocate(KIB)
            await asyncio.sleep(0)
            y = pool.allocate(KIB)
            left = reservation.left
            del x, y
            return left

    async def child() -> None:
        pool.allocate(KIB)

    async def work() -> None:
        lefts = await asyncio.gather(*(own(i * KIB) for i in range(2, 9)))
        assert lefts == [(i - 2) * KIB for i in range(2, 9)]
        with pool.reserve(8 * KIB) as reservation:
            await asyncio.gather(child(), child())
            assert reservation.left <= 7 * KIB

    asyncio.run(work())
    assert held_blocks(pool) == 0


def test_many_threads(pool: Pool, driver: FaultyDriver) -> None:
    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(100):
            with pool.reserve(64 * KIB) as reservation:
                kept = [pool.allocate(choose.randrange(1, 8 * KIB)) for _ in range(8)]
                rooms = sum(-(-memory.nbytes // 512) * 512 for memory in kept)
                assert reservation.left == 64 * KIB - rooms
                for i, memory in enumerate(kept):
                    memory.copy_from_host(bytes([i]) * memory.nbytes)
                for i, memory in enumerate(kept):
                    assert memory.copy_to_host() == bytes([i]) * memory.nbytes

    in_threads(work, *range(SEED, SEED + 4))
    assert held_blocks(pool) == 0
    check(pool, driver)


def test_interrupts(pool: Pool) -> None:
    """An interrupt in a call of the pool costs no reservation, and none stays behind."""

    def step(choose: random.Random) -> None:
        with pool.reserve(MIB):
            kept = [pool.allocate(choose.randrange(1, 8 * KIB)) for _ in range(3)]
            del kept

    with pool.reserve(MIB) as lasting:
        interrupted(step, count=500, most=1e-3)
        assert lasting.left > 0
    assert held_blocks(pool) == 0
    pool.trim()
    assert pool.memory_reserved() == 0


def test_fork() -> None:
    pool = Pool(driver=FaultyDriver())
    with contextlib.ExitStack() as block:
        reservation = block.enter_context(pool.reserve(MIB))

        def child() -> None:
            with pytest.raises(RuntimeError, match="spawn"), pool.reserve(KIB):
                pytest.fail("entered")
            block.close()

        in_fork(child)
        assert reservation.left == MIB
    assert reservation.left == held_blocks(pool) == 0


def test_with_the_debug_mode(driver: FaultyDriver) -> None:
    pool = Pool(driver=driver, debug=True)
    with pool.reserve(10 * (KIB + 1024)) as reservation:
        driver.fails = lambda *_: True
        kept = [pool.full(KIB // 4, float(i)) for i in range(10)]
        assert reservation.left == 0
        pool.check()
        assert all((x == i).all() for i, x in enumerate(kept))
    kept.clear()
    pool.check()
    pool.trim()
    assert held_blocks(pool) == 0


def test_snapshot_and_health(pool: Pool) -> None:
    with pool.reserve(MIB) as reservation:
        x = pool.allocate(KIB)
        blocks = [b for s in pool.snapshot()["segments"] for b in s["blocks"]]
        states = {block["state"]: block["requested_size"] for block in blocks}
        assert states["active_allocated"] == KIB
        assert states["active_pending_free"] == reservation.left == MIB - KIB
        assert pool.health()
        assert pool.memory_summary()
    del x


def test_repr(pool: Pool) -> None:
    reservation = pool.reserve("1MiB")
    assert isinstance(reservation, Reservation)
    assert repr(reservation) == "<reservation of 1 MiB: 0 B left>"
    with reservation:
        assert repr(reservation) == "<reservation of 1 MiB: 1 MiB left>"
