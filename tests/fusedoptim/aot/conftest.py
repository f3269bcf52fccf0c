from __future__ import annotations

from pathlib import Path

import pytest

from fusedoptim import aot
from fusedoptim.launch.modules import FOLDER

SAXPY = """
#ifndef FACTOR
#define FACTOR 1
#endif
kernel void saxpy(uint n, float a, global const float *x, global float *y) {
    size_t i = get_global_id(0);
    if (i < n) y[i] += FACTOR * a * x[i];
}
kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }
"""


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two OpenCL C kernels in one file, and SPIR-V compiled from Python."""
    file = tmp_path_factory.mktemp("sources") / "saxpy.cl"
    file.write_text(SAXPY)
    return [file, FOLDER / "sgd_f32.spv"]


@pytest.fixture(scope="session")
def built(sources: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bundle") / "mine.fob"
    aot.build(sources, output)
    return output


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """A bundle that a test may alter."""
    path = tmp_path / "copy.fob"
    path.write_bytes(built.read_bytes())
    return path
