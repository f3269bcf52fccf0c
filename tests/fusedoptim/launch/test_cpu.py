"""What the launcher knows of the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fusedoptim.kernels.rounding import BLOCK
from fusedoptim.launch import cpu
from fusedoptim.launch.backend import Backend
from fusedoptim.launch.devices import BACKENDS


def _core(folder: Path, core: int, shared_by: str, size: str) -> None:
    cache = folder / f"cpu{core}" / "cache" / "index3"
    cache.mkdir(parents=True)
    (cache / "shared_cpu_list").write_text(f"{shared_by}\n")
    (cache / "size").write_text(f"{size}\n")


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ({0}, 16 * 2**20),
        ({0, 1}, 16 * 2**20),
        ({0, 1, 2, 3}, 32 * 2**20),  # two caches
        ({0, 1, 4}, 0),  # Linux reports nothing of core 4
        ({2, 5}, 0),  # it reports nonsense of core 5
        ({0, 1, 6, 7}, 0),  # 4 MiB for each
    ],
)
def test_batch_bytes(
    cores: set[int], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for core, shared_by, size in (
        *((0, "0-1,6-7", "32768K"), (1, "0-1,6-7", "32768K"), (2, "2-3", "32768K")),
        *((3, "2-3", "32768K"), (5, "5", "large"), (6, "0-1,6-7", "32768K")),
        (7, "0-1,6-7", "32768K"),
    ):
        _core(tmp_path, core, shared_by, size)
    monkeypatch.setattr(cpu, "_CORES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert cpu.CPU().batch_bytes == expected


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_rows_are_whole_blocks(backend: Backend) -> None:
    """Otherwise, kernels would look elsewhere for the scales of 8-bit state."""
    assert backend.shape.chunk % (backend.shape.lanes * BLOCK) == 0
