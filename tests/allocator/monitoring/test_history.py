"""Entries that record_history() keeps, and call sites that it names."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from allocator import Hook, OutOfMemoryError, Pool
from allocator.monitoring.history import History
from tests.allocator.helpers import OtherQueue, actions
from tests.interrupts import at_line, stopping_at
from tests.running import check_script


@pytest.fixture
def pool() -> Pool:
    """A pool that records its whole history."""
    pool = Pool("cpu", limit="64MiB")
    pool.record_history()
    return pool


def trace(pool: Pool) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = pool.snapshot()["device_traces"][0]
    return entries


def test_a_life(pool: Pool) -> None:
    x = pool.empty(100)
    del x
    pool.trim()
    assert actions(pool) == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "segment_free",
    ]
    times = [entry["time_us"] for entry in trace(pool)]
    assert times == sorted(times)


def test_frames_begin_at_the_callers_line(pool: Pool) -> None:
    _x = pool.zeros(100)
    frame = trace(pool)[-1]["frames"][0]
    assert frame["filename"] == __file__
    assert frame["name"] == "test_frames_begin_at_the_callers_line"
    with open(__file__) as file:
        assert "x = pool.zeros(100)" in file.readlines()[frame["line"] - 1]
    assert pool.snapshot()["segments"][0]["frames"][0] == frame


def test_equal_stacks_are_one(pool: Pool) -> None:
    _kept = [pool.empty(n) for n in (10, 20)]
    first, second = [entry["frames"] for entry in trace(pool) if entry["action"] == "alloc"]
    assert first is second


def test_no_stacks(pool: Pool) -> None:
    pool.record_history(stacks=None)
    _x = pool.empty(100)
    assert all(entry["frames"] == [] for entry in trace(pool))


def test_the_last_entries_are_kept(pool: Pool) -> None:
    pool.record_history(max_entries=3)
    for _ in range(10):
        pool.empty(100)
    assert actions(pool) == ["alloc", "free_requested", "free_completed"]


def test_stopping_keeps_and_starting_forgets(pool: Pool) -> None:
    _x = pool.empty(100)
    pool.record_history(enabled=False)
    _y = pool.empty(100)
    assert actions(pool) == ["segment_alloc", "alloc"]
    pool.record_history()
    pool.record_history()
    assert actions(pool) == []
    _z = pool.empty(100)
    assert actions(pool) == ["alloc"]


def test_no_room_names_the_largest_sites(pool: Pool) -> None:
    _kept = [pool.allocate(5 << 20) for _ in range(4)]
    _other = pool.allocate(1000)
    with pytest.raises(OutOfMemoryError) as info:
        pool.allocate(100 << 20)
    first, second = info.value.sites
    assert first.blocks == 4
    assert first.nbytes > second.nbytes
    assert f"{__file__}:" in first.where
    assert first.where.endswith("(<listcomp>)") or "names_the_largest" in first.where
    assert first.where in str(info.value)
    oom = next(entry for entry in trace(pool) if entry["action"] == "oom")
    assert oom["size"] == 100 << 20
    # The pool gave back what it could before it failed.
    assert oom["device_free"] == (64 << 20) - pool.memory_reserved()
    stats = pool.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
    pickle.loads(pickle.dumps(info.value))


def test_memory_that_a_queue_uses_completes_later(pool: Pool) -> None:
    queue, memory = OtherQueue(), pool.allocate(4096)
    pool.record_queue(memory, queue)
    memory.release()
    assert actions(pool)[-1] == "free_requested"
    queue.is_done = True
    _again = pool.allocate(4096)
    assert actions(pool)[-3:] == ["free_requested", "free_completed", "alloc"]


def test_another_thread_completes_nothing_twice(pool: Pool) -> None:
    queue, memory = OtherQueue(), pool.allocate(4096)
    pool.record_queue(memory, queue)
    memory.release()
    queue.is_done = True
    other = threading.Thread(target=lambda: pool.allocate(4096))

    def meanwhile() -> None:
        other.start()
        other.join(0.1)  # it may have to wait for this thread

    with stopping_at(at_line(History._complete_finished, "self._awaited = ["), meanwhile):
        _held = pool.allocate(4096)
    other.join()
    assert actions(pool).count("free_completed") == 2  # with the other thread's memory


def test_an_empty_allocation_is_none(pool: Pool) -> None:
    _memory = pool.allocate(0)
    assert actions(pool) == []


def test_a_refused_allocation_comes_back(pool: Pool) -> None:
    class Refuses(Hook):
        def allocated(self, pool: Pool, allocation: Any) -> None:
            raise RuntimeError("no")

    with pool.hook(Refuses()), pytest.raises(RuntimeError, match="no"):
        pool.empty(100)
    assert pool.memory_allocated() == 0
    assert actions(pool)[1:] == ["alloc", "free_requested", "free_completed"]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_entries": -1}, ValueError, "max_entries=-1"),
        ({"max_entries": 1.5}, TypeError, r"max_entries=1\.5"),
        ({"stacks": "c++"}, ValueError, "stacks='c\\+\\+'"),
    ],
)
def test_bad_arguments(
    pool: Pool, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        pool.record_history(**arguments)
    _x = pool.empty(100)
    assert actions(pool) == ["segment_alloc", "alloc"]  # the earlier recording continues


def test_a_snapshot_in_a_fork_beside_a_busy_pool() -> None:
    """The child's pool has a lock of its own, also where a release awaits another queue."""
    check_script(
        """
        import os, threading
        from allocator import Hook, Pool

        class Last(Hook):
            def allocated(self, pool, allocation):
                self.allocation = allocation

        pool, last = Pool("cpu"), Last()
        pool.add_hook(last)
        pool.record_history()
        tensor = pool.empty(1000)
        pool._history._awaited.append(last.allocation)
        held, done = threading.Event(), threading.Event()

        def hold():
            with pool._core.lock:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if not child:
            threading.Timer(20, os._exit, [1]).start()
            pool.snapshot()
            os._exit(0)
        done.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )
