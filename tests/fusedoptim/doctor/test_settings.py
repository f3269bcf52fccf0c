"""The settings that the doctor finds and those that it recommends, on machines of several kinds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusedoptim.doctor import _machine, _settings
from fusedoptim.doctor._report import Section
from fusedoptim.doctor._workers import Outcome
from fusedoptim.runtime import _cores, huge_pages, memory

USE_HUGE_PAGES = "fusedoptim.runtime.use_huge_pages(model, optimizer)"
Examine = Callable[[int | None], tuple[Section, Section]]


@pytest.fixture
def examine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Examine:
    """Return the settings that are found and wished, given torch's number of threads.

    The process has cores 0 to 3, all on one node. Huge pages are on request, and malloc is glibc's,
    which does not keep memory.
    """
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(_settings, "_HUGE_PAGES", tmp_path / "enabled")
    for node, own in enumerate(("0-7", "8-15")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(own)
    monkeypatch.setattr(_cores, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(memory, "other_malloc", lambda: None)
    monkeypatch.setattr(memory, "_is_kept", False)
    monkeypatch.setattr(memory, "_initial_environment", dict)
    monkeypatch.setattr(huge_pages, "can_move_pages", lambda: True)
    monkeypatch.setattr(_machine, "cpu_limit", lambda: None)
    for name in ("THP_MEM_ALLOC_ENABLE", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)

    def sections(threads: int | None) -> tuple[Section, Section]:
        said = [{"devices": [{"units": 4, "on_host": True}, {"units": 96, "on_host": False}]}]
        if threads is not None:
            said.append({"threads": threads})  # type: ignore[dict-item]  # another line
        first, second = _settings.sections([Outcome(said, ""), Outcome([], "")])
        return first, second

    return sections


def test_ordinary(examine: Examine) -> None:
    found, wished = examine(4)
    assert found.facts == {
        "cores": "0-3",
        "NUMA nodes": {"node 0": "0-3"},
        "torch's threads": 4,
        "the CPU driver's threads": 4,
        "malloc": "glibc",
        "freed memory is kept": False,
        "transparent huge pages": "madvise",
    }
    assert found.problems == wished.problems == []
    assert set(wished.facts) == {"fusedoptim.runtime.keep_memory()", USE_HUGE_PAGES}
    assert all("docs/" in reason for reason in wished.facts.values())


def test_all_is_set(examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_is_kept", True)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")
    found, wished = examine(4)
    assert found.facts["freed memory is kept"] is True
    assert wished.facts == {"settings": "none"}


@pytest.mark.parametrize(
    "variables", [{"MALLOC_MMAP_MAX_": "0"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}]
)
def test_kept_by_a_variable(
    variables: dict[str, str], examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_initial_environment", lambda: variables)
    found, wished = examine(4)
    assert found.facts["freed memory is kept"] is True
    assert "fusedoptim.runtime.keep_memory()" not in wished.facts


def test_another_malloc(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "other_malloc", lambda: "/usr/lib/libjemalloc.so.2")
    found, wished = examine(4)
    assert found.facts["malloc"] == "/usr/lib/libjemalloc.so.2"
    assert "fusedoptim.runtime.keep_memory()" not in wished.facts


@pytest.mark.parametrize("chosen", ["always", "never", None])
def test_huge_pages_that_torch_cannot_ask_for(
    chosen: str | None, examine: Examine, tmp_path: Path
) -> None:
    file = tmp_path / "enabled"
    if chosen is None:
        file.unlink()
    else:
        file.write_text("always madvise never\n".replace(chosen, f"[{chosen}]"))
    found, wished = examine(4)
    assert found.facts["transparent huge pages"] == chosen
    assert USE_HUGE_PAGES not in wished.facts


def test_linux_that_cannot_move_pages(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "can_move_pages", lambda: False)
    _, wished = examine(4)
    assert USE_HUGE_PAGES not in wished.facts
    assert "with keep_memory() only" in wished.facts["THP_MEM_ALLOC_ENABLE=1"]


def test_more_threads_than_cores(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    found, wished = examine(16)
    (problem,) = found.problems
    assert "torch starts 16 threads for the cores 0-3" in problem.message
    assert problem.cure == "export OMP_NUM_THREADS=4"
    assert wished.facts["OMP_NUM_THREADS=4"] == "there is processor time for 4, not 16"
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert examine(16)[0].problems[0].cure == "unset OMP_NUM_THREADS"


def test_more_threads_than_processor_time(
    examine: Examine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's check warns of too many threads, as the driver's are too many as well."""
    monkeypatch.setattr(_machine, "cpu_limit", lambda: 1.5)
    found, wished = examine(4)
    assert found.problems == []
    assert "OMP_NUM_THREADS=2" in wished.facts


def test_several_nodes(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {6, 7, 8})
    found, wished = examine(3)
    assert found.facts["NUMA nodes"] == {"node 0": "6-7", "node 1": "8"}
    reason = wished.facts["fusedoptim.runtime.pin(CPUPool(node_id=0))"]
    assert "the cores are on 2 NUMA nodes" in reason


def test_without_torch(examine: Examine) -> None:
    found, _ = examine(None)
    assert found.facts["torch's threads"] is None
    assert found.problems == []


def test_nothing_is_changed() -> None:
    before = memory._is_kept, dict(os.environ), os.sched_getaffinity(0)
    list(_settings.sections([]))
    assert (memory._is_kept, dict(os.environ), os.sched_getaffinity(0)) == before
