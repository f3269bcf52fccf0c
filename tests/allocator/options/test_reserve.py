"""Reserved memory is available in the block, and is returned however the block ends."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import pytest

from allocator import OutOfMemoryError, Pool, Reservation
from tests.allocator.helpers import (
    KIB,
    MIB,
    FaultyDriver,
    blocks_of,
    check,
    once_inside,
)
from tests.running import in_fork, in_threads


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


def test_others_get_nothing_of_it(pool: Pool) -> None:
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
    pool.trim()
    assert driver.reserved == 0


def test_fails_at_the_start(pool: Pool) -> None:
    pool.set_limit(MIB)
    reservation = pool.reserve("8MiB")
    with pytest.raises(OutOfMemoryError, match="mine has no room for 8 MiB"), reservation:
        pytest.fail("entered")
    assert reservation.left == 0
    pool.set_limit(None)
    with pytest.raises(RuntimeError, match="entered before"), reservation:
        pass


def test_zero_bytes(pool: Pool, driver: FaultyDriver) -> None:
    with pool.reserve(0) as reservation:
        assert reservation.left == driver.calls == 0
        _x = pool.allocate(1)


def test_nested(pool: Pool, driver: FaultyDriver) -> None:
    """The innermost reservation serves requests first, then the outer ones."""
    with pool.reserve(8 * KIB) as outer:
        with pool.reserve(4 * KIB) as inner:
            driver.fails = lambda *_: True
            kept = [pool.allocate(3 * KIB)]
            assert (outer.left, inner.left) == (8 * KIB, KIB)
            kept.append(pool.allocate(2 * KIB))
            assert (outer.left, inner.left) == (6 * KIB, KIB)
        kept.append(pool.allocate(6 * KIB))
        assert (outer.left, inner.left) == (0, 0)


def test_blocks_that_end_in_another_order(pool: Pool) -> None:
    one, two = pool.reserve(4 * KIB), pool.reserve(8 * KIB)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    _x = pool.allocate(KIB)
    assert (one.left, two.left) == (0, 7 * KIB)
    two.__exit__(None, None, None)


@pytest.mark.parametrize("alignment", [512, 4 * KIB, 64 * KIB])
def test_alignment(pool: Pool, alignment: int) -> None:
    with pool.reserve(MIB) as reservation:
        kept = [pool.allocate(100, alignment=alignment) for _ in range(4)]
        assert all(memory.address % alignment == 0 for memory in kept)
        assert MIB - 5 * alignment <= reservation.left <= MIB - 3 * alignment - 512


def test_a_released_part_is_not_put_aside_again(pool: Pool) -> None:
    with pool.reserve(64 * KIB) as reservation:
        pool.empty(KIB)
        assert reservation.left == 60 * KIB
        for _ in range(100):
            pool.empty(KIB)
        assert reservation.left == 60 * KIB  # all tensors reuse the same memory
        assert pool.memory_allocated() == 0


def test_trim_and_the_last_try_leave_it(pool: Pool, driver: FaultyDriver) -> None:
    with pool.reserve("8MiB") as reservation:
        pool.trim()
        pool.empty_cache()
        driver.fails = lambda *_: True
        with pytest.raises(OutOfMemoryError):
            pool.allocate(20 * MIB)
        assert reservation.left == 8 * MIB
        _x = pool.full(MIB, 1.0)
        assert reservation.left == 4 * MIB
        check(pool, driver)


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
    """The pool repairs its records after the error."""
    with pool.reserve(MIB) as reservation:
        _x = pool.allocate(KIB)
        driver.error, driver.fails = RuntimeError("device lost"), lambda *_: True
        with pytest.raises(RuntimeError, match="device lost"):
            pool.allocate(20 * MIB)
        assert reservation.left == MIB - KIB
        _y = pool.full(1000, 1.0)
        assert reservation.left == MIB - KIB - 4096
        check(pool, driver)


def test_finalizer_inside_the_pools_own_call(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator collected there ends its reservation; a new reservation there is refused."""

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
    _x = contextvars.Context().run(pool.allocate, 3 * MIB)
    assert generator is None


def test_fork(pool: Pool) -> None:
    with contextlib.ExitStack() as block:
        reservation = block.enter_context(pool.reserve(MIB))

        def child() -> None:
            with pytest.raises(RuntimeError, match="spawn"), pool.reserve(KIB):
                pytest.fail("entered")
            block.close()

        in_fork(child)
        assert reservation.left == MIB
    assert reservation.left == 0


def test_snapshot_and_health(pool: Pool) -> None:
    with pool.reserve(MIB) as reservation:
        _x = pool.allocate(KIB)
        blocks = blocks_of(pool.snapshot())
        states = {block["state"]: block["requested_size"] for block in blocks}
        assert states["active_allocated"] == KIB
        assert states["active_pending_free"] == reservation.left == MIB - KIB
        assert pool.health()
        assert pool.memory_summary()


def test_repr(pool: Pool) -> None:
    reservation = pool.reserve("1MiB")
    assert isinstance(reservation, Reservation)
    assert repr(reservation) == "<reservation of 1 MiB: 0 B left>"
    with reservation:
        assert repr(reservation) == "<reservation of 1 MiB: 1 MiB left>"
