"""The statistics that a pool reports equal a recount."""

from __future__ import annotations

import inspect
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import allocator
from allocator import Hook, Memory, OutOfMemoryError, Pool
from tests.allocator.helpers import OtherQueue, blocks_of, random_use
from tests.running import in_threads


def test_counters_and_health_equal_a_recount(pool: Pool) -> None:
    kept = random_use(pool, 600)
    nbytes = [x.nbytes for x in kept]
    stats = pool.memory_stats()
    assert stats["allocation.all.current"] == len(kept)
    assert stats["requested_bytes.all.current"] == sum(nbytes)
    snapshot = pool.snapshot()
    in_use = [b for b in blocks_of(snapshot) if b["state"] != "inactive"]
    assert stats["allocated_bytes.all.current"] == sum(b["size"] for b in in_use)
    assert stats["reserved_bytes.all.current"] == sum(s["total_size"] for s in snapshot["segments"])
    assert stats["segment.all.current"] == len(snapshot["segments"])
    for metric in ("allocation", "allocated_bytes", "requested_bytes", "active", "segment"):
        for fact in ("current", "allocated", "freed"):
            small, large = (stats[f"{metric}.{tier}_pool.{fact}"] for tier in ("small", "large"))
            assert stats[f"{metric}.all.{fact}"] == small + large
        rises, falls = (stats[f"{metric}.all.{fact}"] for fact in ("allocated", "freed"))
        assert rises - falls == stats[f"{metric}.all.current"]
        assert stats[f"{metric}.all.peak"] >= stats[f"{metric}.all.current"]
    health = pool.health()
    free = health.reserved_bytes - health.allocated_bytes
    assert health.free_bytes == free
    assert health.requested_bytes == sum(nbytes)
    assert health.internal_waste_bytes == health.allocated_bytes - health.requested_bytes
    blocks = blocks_of(snapshot)
    largest = max((b["size"] for b in blocks if b["state"] == "inactive"), default=0)
    assert health.largest_free_bytes == largest
    assert health.fragmentation == (1 - largest / free if free else 0)
    assert 0 < health.hit_rate <= 1


def test_peaks_and_sums_start_anew(pool: Pool) -> None:
    x, y = pool.empty(1000), pool.empty(1000)
    del x
    pool.reset_peak_memory_stats()
    assert pool.max_memory_allocated() == pool.memory_allocated() == 4096
    pool.reset_accumulated_memory_stats()
    stats = pool.memory_stats()
    assert (stats["allocation.all.allocated"], stats["allocation.all.freed"]) == (0, 0)
    del y
    assert pool.memory_stats()["allocation.all.freed"] == 1


def test_memory_that_a_queue_still_uses_is_active(pool: Pool) -> None:
    memory = pool.allocate(4096)
    pool.record_queue(memory, OtherQueue())
    memory.release()
    stats = pool.memory_stats()
    assert (stats["allocation.all.current"], stats["active.all.current"]) == (0, 1)
    assert "active_pending_free" in [block["state"] for block in blocks_of(pool.snapshot())]


def test_the_summary_names_what_it_counts(pool: Pool) -> None:
    _x = pool.empty(256)
    text = pool.memory_summary()
    assert text.splitlines()[0] == pool.name
    assert "1 KiB" in text
    assert "reserved_bytes large" in text
    short = pool.memory_summary(abbreviated=True)
    assert len(short.splitlines()) == 3 + len(TORCHS_METRICS.split())
    assert " large" not in short


def test_memory_tells_its_size(pool: Pool) -> None:
    memory: Memory = pool.allocate(1000)
    assert (len(memory), memory.nbytes) == (1000, 1000)
    assert "1000 B" in repr(memory)
    assert torch.from_dlpack(memory).numel() == 1000


TORCHS_METRICS = """
    active active_bytes allocated_bytes allocation inactive_split inactive_split_bytes
    requested_bytes reserved_bytes segment
"""
TORCHS_COUNTS = """
    max_split_size num_alloc_retries num_device_alloc num_device_free num_oom_rejections num_ooms
    num_sync_all_streams
"""
OURS = {"driver_calls", "fragmentation", "hit_rate", "internal_waste_bytes"}


def test_the_names_are_torchs(pool: Pool) -> None:
    facts = ("current", "peak", "allocated", "freed")
    names = {
        f"{metric}.{tier}.{fact}"
        for metric in TORCHS_METRICS.split()
        for tier in ("all", "large_pool", "small_pool")
        for fact in facts
    }
    names |= {f"oversize_{what}.{fact}" for what in ("allocations", "segments") for fact in facts}
    stats = pool.memory_stats()
    assert set(stats) == names | {*TORCHS_COUNTS.split()} | OURS
    assert list(stats) == sorted(stats)
    nested = pool.memory_stats_as_nested_dict()
    assert nested["allocation"]["all"]["current"] == stats["allocation.all.current"]


def test_idle_blocks_equal_a_recount(pool: Pool) -> None:
    kept = random_use(pool, 600)
    stats = pool.memory_stats()
    snapshot = pool.snapshot()  # merges the cached blocks with their neighbors
    after = pool.memory_stats()
    for tier in ("small", "large"):
        idle = [
            block["size"]
            for segment in snapshot["segments"]
            for block in segment["blocks"]
            if segment["segment_type"] == tier and segment["active_size"]
            if block["state"] == "inactive"
        ]
        assert after[f"inactive_split.{tier}_pool.current"] == len(idle)
        for figures in (stats, after):
            assert figures[f"inactive_split_bytes.{tier}_pool.current"] == sum(idle)
    assert after["inactive_split.all.peak"] >= after["inactive_split.all.current"]
    del kept
    assert pool.memory_stats()["inactive_split_bytes.all.current"] == 0


def test_hits_of_a_loop(pool: Pool) -> None:
    assert pool.health().hit_rate == 1
    for _ in range(100):
        pool.empty(100)
    health = pool.health()
    assert (health.allocations, health.driver_calls, health.hit_rate) == (100, 1, 0.99)
    stats = pool.memory_stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 100
    assert stats["requested_bytes.all.allocated"] == 100 * 400
    assert stats["allocation.all.peak"] == 1


def test_prometheus(pool: Pool) -> None:
    text = pool.health().prometheus(pool='a "b"\\c\nd')
    assert 'allocator_hit_rate{pool="a \\"b\\"\\\\c\\nd"} 1.0\n' in text
    assert "# TYPE allocator_ooms_total counter\n" in text
    assert 'allocator_ooms_total{rank="0",first="True"} 0\n' in pool.health().prometheus(
        rank=0, first=True
    )
    lines = pool.health().prometheus().splitlines()
    assert len(lines) == 2 * len(pool.health())
    for line in lines[1::2]:
        name, value = line.split()
        assert name.startswith("allocator_")
        float(value)


def test_failures_are_counted_until_reset() -> None:
    pool = Pool("cpu", limit="4MiB")
    with pytest.raises(OutOfMemoryError):
        pool.allocate(8 << 20)
    stats = pool.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (1, 1)
    pool.reset_accumulated_memory_stats()
    stats = pool.memory_stats()
    assert (stats["num_ooms"], stats["num_alloc_retries"], stats["driver_calls"]) == (0, 0, 0)


def test_hooks_that_raise_leave_the_counters_true(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailsToAllocate(Hook):
        def allocated(self, pool: Pool, allocation: Any) -> None:
            raise RuntimeError("no")

        def released(self, pool: Pool, allocation: Any) -> None:
            raise AssertionError("it was never told of the allocation")

    class FailsToRelease(Hook):
        def released(self, pool: Pool, allocation: Any) -> None:
            raise RuntimeError("nor")

    reported: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", reported.append)
    with pool.hook(FailsToRelease()), pool.hook(FailsToAllocate()):
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no"):
                pool.empty(100)
        stats = pool.memory_stats()
    assert [type(error.exc_value) for error in reported] == [RuntimeError] * 3
    assert stats["allocation.all.current"] == stats["allocated_bytes.all.current"] == 0
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 3


def test_error_of_a_hook_is_reported_as_python_does(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Hook):
        def released(self, pool: Pool, allocation: Any) -> None:
            raise KeyError("mine")

    monkeypatch.setattr("sys.unraisablehook", sys.__unraisablehook__)
    with pool.hook(Failing()):
        pool.empty(100)
        assert pool.memory_allocated() == 0
    reported = capsys.readouterr().err
    for part in ("Exception ignored in a pool's hook: <", "Failing", "KeyError: 'mine'"):
        assert part in reported


def test_a_hook_whose_attribute_fails_keeps_no_memory_in_use(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Hook):
        @property
        def released(self) -> Any:  # type: ignore[override]  # as in a hook that is half made
            raise AttributeError("mine")

    reported: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", reported.append)
    with pool.hook(Failing()):
        pool.empty(100)
        assert Pool("cpu").memory_allocated() == pool.memory_allocated() == 0
    assert [str(error.exc_value) for error in reported] == ["mine"]


def test_an_object_with_all_methods_of_a_hook(pool: Pool) -> None:
    called: list[str] = []
    names = [name for name in vars(Hook) if not name.startswith("_")]
    hook: Any = SimpleNamespace(**{n: lambda *_, n=n: called.append(n) for n in names})
    with pool.hook(hook):
        pool.empty(100)
        assert pool.memory_allocated() == 0
    assert {"before_allocate", "allocated", "released"} <= set(called)
    del hook.released
    with pytest.raises(TypeError, match="derive a class"):
        pool.add_hook(hook)


def test_threads_are_all_counted(pool: Pool) -> None:
    def work() -> None:
        for i in range(300):
            pool.empty(100 + i % 3)

    in_threads(work, count=4)
    stats = pool.memory_stats()
    assert stats["allocation.all.allocated"] == stats["allocation.all.freed"] == 1200
    assert stats["allocation.all.current"] == stats["allocated_bytes.all.current"] == 0
    assert stats["requested_bytes.all.allocated"] == 4 * 4 * sum(100 + i % 3 for i in range(300))


def test_functions_of_the_default_pool() -> None:
    pool = allocator.default_pool("cpu")
    _x = pool.empty(1000)
    assert allocator.memory_allocated() == pool.memory_allocated()
    assert allocator.memory_reserved() == pool.memory_reserved()
    assert allocator.max_memory_allocated() == pool.max_memory_allocated()
    assert allocator.max_memory_reserved() == pool.max_memory_reserved()
    assert allocator.memory_stats() == pool.memory_stats()
    assert allocator.memory_summary(abbreviated=True) == pool.memory_summary(abbreviated=True)
    assert allocator.memory_snapshot() == pool.snapshot()["segments"]
    allocator.reset_peak_memory_stats()
    allocator.reset_accumulated_memory_stats()
    assert allocator.memory_stats()["allocation.all.allocated"] == 0
    assert allocator.max_memory_allocated() == allocator.memory_allocated() > 0


@pytest.mark.parametrize(
    "name", [name for name in allocator.__all__ if "memory" in name and hasattr(Pool, name)]
)
def test_help_and_errors_of_functions_of_the_default_pool(name: str) -> None:
    function, method = (getattr(owner, name) for owner in (allocator, Pool))
    _, *own = inspect.signature(method).parameters.values()
    device, *others = inspect.signature(function).parameters.values()
    assert (device.name, device.default, others) == ("device", "cpu", own)
    with pytest.raises(TypeError, match=rf"^{name}\(\) takes from 0 to "):
        function("cpu", *others, 1)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'wrong'"):
        function(wrong=1)
    assert pickle.loads(pickle.dumps(function)) is function


def test_what_is_put_aside_is_not_free(pool: Pool) -> None:
    with pool.reserve("3MiB"):
        health = pool.health()
        assert health.free_bytes == health.reserved_bytes - (3 << 20)
        assert pool.memory_stats()["inactive_split_bytes.all.current"] == health.free_bytes
