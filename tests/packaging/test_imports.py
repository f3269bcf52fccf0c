"""Importing is free, and a shadowed name is named."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

import fusedoptim
from fusedoptim._facade import import_own

ROOT = Path(__file__).parents[2]
PACKAGES = ("allocator", "fusedoptim", "transforms")


def run(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("statement", [f"import {name}" for name in PACKAGES])
def test_import_loads_no_compiler_and_touches_no_device(statement: str, tmp_path: Path) -> None:
    script = (
        f"{statement}\nimport sys\n"
        "print(sorted({'numba', 'numba_dpex', 'dpnp', 'dpctl', 'llvmlite'} & set(sys.modules)))"
    )
    done = run(script, tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_allocator_and_transforms_do_not_import_torch(tmp_path: Path) -> None:
    done = run("import allocator, sys; print('torch' in sys.modules)", tmp_path)
    assert done.stdout == "False\n"


def test_from_fusedoptim_import_everything(tmp_path: Path) -> None:
    script = (
        "from fusedoptim import FusedSGD, transforms, allocator\n"
        "import allocator as bare\n"
        "print(allocator.queue is bare.queue)"
    )
    done = run(script, tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("name", ["allocator", "transforms"])
def test_facade_exports_what_the_package_does(name: str) -> None:
    facade, package = importlib.import_module(f"fusedoptim.{name}"), importlib.import_module(name)
    assert facade.__all__ == package.__all__
    for exported in package.__all__:
        assert getattr(facade, exported) is getattr(package, exported)


@pytest.mark.parametrize("name", ["allocator", "transforms"])
def test_shadowed_by_a_users_file(name: str, tmp_path: Path) -> None:
    shadow = tmp_path / f"{name}.py"
    shadow.write_text("raise SystemExit('foreign code ran')\n")
    done = run(f"import fusedoptim.{name}", tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(shadow) in done.stderr
    assert "rename or move that" in done.stderr


def test_shadowed_by_a_folder_without_init(tmp_path: Path) -> None:
    """Installed from a wheel ours is found; of an editable install the folder is named."""
    (tmp_path / "transforms").mkdir()
    done = run("from fusedoptim import transforms; print(transforms.optimize.__name__)", tmp_path)
    assert done.stdout == "optimize\n" or str(tmp_path / "transforms") in done.stderr


def test_shadowed_transforms_does_not_break_the_optimizers(tmp_path: Path) -> None:
    (tmp_path / "transforms.py").write_text("raise SystemExit('foreign code ran')\n")
    done = run("from fusedoptim import FusedSGD; print(FusedSGD.__name__)", tmp_path)
    assert done.stdout == "FusedSGD\n"


def test_overwritten_by_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("allocator"), "__fusedoptim__", "0.0.0")
    with pytest.raises(ImportError, match="another distribution named 'allocator'"):
        import_own("allocator")


def test_versions_agree() -> None:
    for name in ("allocator", "transforms"):
        assert importlib.import_module(name).__fusedoptim__ == fusedoptim.__version__
    assert importlib.metadata.version("fusedoptim") == fusedoptim.__version__


def test_every_package_is_listed_and_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for name in PACKAGES
        for path in (ROOT / name).rglob("__init__.py")
    }
    assert listed == found
    for name in PACKAGES:
        assert (ROOT / name / "py.typed").exists()
