"""`make kernels-validate`: what it compiles, and what it reports."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fusedoptim.kernels import _validation
from fusedoptim.kernels._validation import objections, validate
from fusedoptim.launch import modules
from tests.compiling import needs_gpu_compiler


@needs_gpu_compiler
def test_module_with_sums(tmp_path: Path) -> None:
    """A module is valid for three GPU generations; `make kernels-validate` takes all."""
    shutil.copy(modules.FOLDER / "lamb_moments_bf16.spv", tmp_path)
    assert objections(tmp_path, tmp_path / "emulated.json") == []
    (tmp_path / "lamb_moments_bf16.spv").write_bytes(b"damaged")
    assert objections(tmp_path, tmp_path / "emulated.json") != []


@needs_gpu_compiler
def test_float64_for_arc_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated float64 is compiled again only if the module or the compiler changed."""
    record, builds = tmp_path / "emulated.json", []
    compile_for_gpus = _validation._compile_for_gpus

    def counted(given: Any, *options: str, **variables: str) -> list[str]:
        builds.extend(given if variables else [])
        return compile_for_gpus(given, *options, **variables)

    monkeypatch.setattr(_validation, "_compile_for_gpus", counted)
    for name, count in (
        ("channels_first_f64", 1),
        ("channels_first_f64", 1),
        ("sum_of_squares_f64", 2),
    ):
        shutil.copy(modules.FOLDER / f"{name}.spv", tmp_path / "module_f64.spv")
        assert objections(tmp_path, record) == []
        assert len(builds) == count
    (tmp_path / "module_f64.spv").write_bytes(b"damaged")
    before = record.read_bytes()
    assert any("module_f64.spv for dg2" in problem for problem in objections(tmp_path, record))
    assert record.read_bytes() == before
    shutil.copy(modules.FOLDER / "sum_of_squares_f64.spv", tmp_path / "module_f64.spv")
    monkeypatch.setattr(_validation, "_ocloc_version", lambda: "another")
    assert objections(tmp_path, record) == []
    assert len(builds) == 4
    assert "another" in record.read_text()


def test_record_has_every_float64_module() -> None:
    """If not, run `make kernels-validate` and commit what it writes."""
    recorded = json.loads(_validation.EMULATED.read_text())["modules"]
    paths = modules.FOLDER.glob("*_f64.spv")
    assert recorded == {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def test_tools_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert validate() == ["not found: spirv-val, ocloc (apt install spirv-tools intel-opencl-icd)"]
