"""The kernels' sources, their compiled modules, and the checks that hold the two together."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from fusedoptim import _modules
from fusedoptim.kernels import __main__ as build_tool
from fusedoptim.kernels import language, sgd

HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None


class TestInterpreted:
    """A kernel is plain Python: called with numpy arrays, it is the update itself."""

    def test_sgd(self) -> None:
        theta, grad = np.random.default_rng().normal(size=(2, 9))
        param = theta.copy()
        sgd.sgd(9, param, grad, lr=0.1, weight_decay=0.2, maximize=0)
        np.testing.assert_allclose(param, theta - 0.1 * (grad + 0.2 * theta), rtol=1e-12)

    @pytest.mark.parametrize("fresh", [0, 1])
    def test_sgd_momentum(self, fresh: int) -> None:
        theta, grad, buffer = np.random.default_rng().normal(size=(3, 9))
        param, momentum_buffer = theta.copy(), buffer.copy()
        sgd.sgd_momentum(
            length=9,
            param=param,
            grad=grad,
            momentum_buffer=momentum_buffer,
            fresh=fresh,
            lr=0.1,
            weight_decay=0.0,
            momentum=0.9,
            undampened=0.5,
            nesterov=1,
            maximize=1,
        )
        expected = -grad if fresh else 0.9 * buffer - 0.5 * grad
        np.testing.assert_allclose(momentum_buffer, expected, rtol=1e-12)
        np.testing.assert_allclose(param, theta - 0.1 * (-grad + 0.9 * expected), rtol=1e-12)


class TestCheck:
    """`python -m fusedoptim.kernels check` sees what changed, without the compiler."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        shutil.copytree(_modules.FOLDER, tmp_path / "spirv")
        shutil.copytree(build_tool._HERE, tmp_path / "kernels")
        monkeypatch.setattr(build_tool, "FOLDER", tmp_path / "spirv")
        monkeypatch.setattr(build_tool, "MANIFEST", tmp_path / "spirv" / "manifest.json")
        monkeypatch.setattr(build_tool, "_HERE", tmp_path / "kernels")
        return tmp_path

    def test_the_repository_passes(self) -> None:
        assert build_tool.check() == []

    @pytest.mark.parametrize("source", ["sgd.py", "language.py", "_lowering.py", "_compiler.py"])
    def test_source_changed(self, tree: Path, source: str) -> None:
        path = tree / "kernels" / source
        path.write_text(path.read_text() + "\n")
        assert "sgd.py changed since it was compiled: run `make kernels`" in build_tool.check()

    def test_new_source(self, tree: Path) -> None:
        shutil.copy(tree / "kernels" / "sgd.py", tree / "kernels" / "new.py")
        assert build_tool.check() == ["new.py has no compiled module: run `make kernels`"]

    def test_source_removed(self, tree: Path) -> None:
        (tree / "kernels" / "sgd.py").unlink()
        assert any("sgd.py is gone" in problem for problem in build_tool.check())

    def test_module_changed(self, tree: Path) -> None:
        path = tree / "spirv" / "sgd_f32.spv"
        path.write_bytes(path.read_bytes() + b"\0")
        assert build_tool.check() == [
            "sgd_f32.spv is not the module that was built: run `make kernels`"
        ]

    def test_module_lost(self, tree: Path) -> None:
        (tree / "spirv" / "sgd_f32.spv").unlink()
        assert build_tool.check() == ["sgd_f32.spv is missing: run `make kernels`"]

    def test_module_unknown(self, tree: Path) -> None:
        (tree / "spirv" / "other_f32.spv").write_bytes(b"")
        assert build_tool.check() == ["other_f32.spv is not in the manifest: run `make kernels`"]


class TestValidate:
    """Every module passes spirv-val and compiles for three generations of GPU."""

    @pytest.mark.skipif(
        shutil.which("spirv-val") is None or shutil.which("ocloc") is None,
        reason="apt install spirv-tools intel-opencl-icd",
    )
    def test_modules(self) -> None:
        assert build_tool.validate() == []

    def test_tools_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert build_tool.validate() == [
            "not found: spirv-val, ocloc (apt install spirv-tools intel-opencl-icd)"
        ]


@pytest.mark.skipif(not HAS_COMPILER, reason="pip install 'fusedoptim[jit]'")
class TestCompiler:
    def test_fresh_build_equals_the_repositorys(self) -> None:
        assert build_tool.verify() == []

    def test_build(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build_tool, "FOLDER", tmp_path)
        monkeypatch.setattr(build_tool, "MANIFEST", tmp_path / "manifest.json")
        (tmp_path / "stale.spv").write_bytes(b"")
        assert build_tool.build() == []
        assert build_tool.check() == []
        assert not (tmp_path / "stale.spv").exists()
        modules = json.loads((tmp_path / "manifest.json").read_text())["modules"]
        for entry in modules.values():
            spirv = (tmp_path / entry["file"]).read_bytes()
            assert hashlib.sha256(spirv).hexdigest() == entry["sha256"]

    def test_argument_without_a_type(self) -> None:
        from fusedoptim.kernels._compiler import compile_kernel

        def kernel(length: language.Length, step) -> None:  # type: ignore[no-untyped-def]
            pass

        with pytest.raises(TypeError, match="'step' has no type"):
            compile_kernel(kernel, "f32", "kernel_f32")


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler is installed")
@pytest.mark.parametrize("command", [build_tool.build, build_tool.verify])
def test_compiler_missing(command: Callable[[], list[str]]) -> None:
    with pytest.raises(ImportError, match=r"pip install 'fusedoptim\[jit\]'"):
        command()
