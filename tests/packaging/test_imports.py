"""Imports are cheap and free of side effects, and a file that shadows a package is named."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import fusedoptim
from fusedoptim._facade import import_own


def run(script: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_imports_load_no_compiler_and_touch_no_device(tmp_path: Path) -> None:
    """Nor torch, but for ``transforms``. Submodules for users are attributes of ``fusedoptim``."""
    script = """
import sys
unwanted = {"numba", "numba_dpex", "dpnp", "dpctl", "llvmlite"}
import allocator
print(sorted((unwanted | {"torch"}) & set(sys.modules)))
import fusedoptim
print(sorted((unwanted | {"torch"}) & set(sys.modules)), {*sys.argv[1:]} <= {*dir(fusedoptim)})
import transforms
print(sorted(unwanted & set(sys.modules)))
bare = allocator
from fusedoptim import FusedSGD, transforms, allocator
print(allocator.queue is bare.queue)
print(all(getattr(fusedoptim, name).__name__ == f"fusedoptim.{name}" for name in sys.argv[1:]))
"""
    pages = (Path(__file__).parents[2] / "docs" / "reference").glob("fusedoptim.*.md")
    public = {page.name.split(".")[1] for page in pages} | {"allocator", "transforms"}
    done = run(script, tmp_path, *sorted(public))
    assert (done.stdout, done.stderr) == ("[]\n[] True\n[]\nTrue\nTrue\n", "")


@pytest.mark.parametrize("name", ["allocator", "transforms"])
def test_facade_exports_what_the_package_does(name: str) -> None:
    facade, package = importlib.import_module(f"fusedoptim.{name}"), importlib.import_module(name)
    assert facade.__all__ == package.__all__
    for exported in package.__all__:
        assert getattr(facade, exported) is getattr(package, exported)


@pytest.mark.parametrize(
    ("name", "before"), [("allocator", ""), ("transforms", "from fusedoptim import FusedSGD")]
)
def test_shadowed_by_a_users_file(name: str, before: str, tmp_path: Path) -> None:
    """Code that needs only the other packages still works."""
    shadow = tmp_path / f"{name}.py"
    shadow.write_text("raise SystemExit('foreign code ran')\n")
    done = run(f"{before}\nprint('works')\nimport fusedoptim.{name}", tmp_path)
    assert (done.returncode, done.stdout) == (1, "works\n")
    assert "ImportError" in done.stderr
    assert str(shadow) in done.stderr
    assert "rename or move that" in done.stderr


def test_shadowed_by_a_folder_without_init(tmp_path: Path) -> None:
    """From a wheel, our package is found; from an editable install, the error names the folder."""
    (tmp_path / "transforms").mkdir()
    done = run("from fusedoptim import transforms; print(transforms.optimize.__name__)", tmp_path)
    assert done.stdout == "optimize\n" or str(tmp_path / "transforms") in done.stderr


def test_overwritten_by_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("allocator"), "__fusedoptim__", "0.0.0")
    with pytest.raises(ImportError, match="another distribution named 'allocator'"):
        import_own("allocator")


def test_versions_agree() -> None:
    for name in ("allocator", "transforms"):
        assert importlib.import_module(name).__fusedoptim__ == fusedoptim.__version__
    assert importlib.metadata.version("fusedoptim") == fusedoptim.__version__
