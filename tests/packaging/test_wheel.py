"""The wheel is pure Python and complete, and works away from the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("allocator", "fusedoptim", "transforms", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        else:
            shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder)]
    subprocess.run(command, check=True)
    (path,) = (folder / "dist").iterdir()
    return path


def test_is_pure_and_complete(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "allocator",
        "fusedoptim",
        "transforms",
    }
    for path in (ROOT / "fusedoptim" / "spirv").iterdir():
        assert f"fusedoptim/spirv/{path.name}" in names
    for package in ("allocator", "fusedoptim", "transforms"):
        assert f"{package}/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_works_when_installed_elsewhere(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(target), str(wheel)], check=True)
    script = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import torch, fusedoptim\n"
        "p = torch.nn.Parameter(torch.ones(20)); p.grad = torch.ones(20)\n"
        "fusedoptim.FusedSGD([p], lr=0.5).step()\n"
        "print(fusedoptim.__file__, p.sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{target}/fusedoptim/__init__.py 10.0\n"
