"""The kernels' sources, their compiled modules, and the checks that hold the two together."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusedoptim.dtypes import VARIANTS
from fusedoptim.kernels import __main__ as build_tool
from fusedoptim.kernels import adagrad, adam, lamb, language, norm, sgd
from fusedoptim.kernels.language import Role
from fusedoptim.launch import modules
from fusedoptim.launch.modules import load_module, shipped

HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None


class TestInterpreted:
    """A kernel is plain Python: called with numpy arrays, it is the update of one element."""

    LENGTH = 9

    def _run(self, kernel: Callable[..., Any], *arrays: Any, **arguments: Any) -> list[Any]:
        """Call ``kernel`` for each element; return what it returned."""
        return [kernel(i, *arrays, **arguments) for i in range(self.LENGTH)]

    def _values(self, count: int) -> Any:
        return np.random.default_rng().normal(size=(count, self.LENGTH))

    def _squares(self, count: int) -> Any:
        return np.random.default_rng().uniform(0.1, 2.0, size=(count, self.LENGTH))

    def test_sgd(self) -> None:
        theta, grad = self._values(2)
        param = theta.copy()
        self._run(sgd.sgd, param, grad, grad_factor=-0.5, lr=0.1, weight_decay=0.2)
        np.testing.assert_allclose(param, theta - 0.1 * (-0.5 * grad + 0.2 * theta), rtol=1e-12)

    @pytest.mark.parametrize("fresh", [0, 1])
    def test_sgd_momentum(self, fresh: int) -> None:
        theta, grad, buffer = self._values(3)
        param, momentum_buffer = theta.copy(), buffer.copy()
        self._run(
            sgd.sgd_momentum,
            param,
            grad,
            momentum_buffer,
            fresh=fresh,
            grad_factor=-1.0,
            lr=0.1,
            weight_decay=0.0,
            momentum=0.9,
            one_minus_dampening=0.5,
            nesterov=1,
        )
        expected = -grad if fresh else 0.9 * buffer - 0.5 * grad
        np.testing.assert_allclose(momentum_buffer, expected, rtol=1e-12)
        np.testing.assert_allclose(param, theta - 0.1 * (-grad + 0.9 * expected), rtol=1e-12)

    def test_adagrad(self) -> None:
        theta, grad = self._values(2)
        (old,) = self._squares(1)
        param, total = theta.copy(), old.copy()
        self._run(
            adagrad.adagrad,
            param,
            grad,
            total,
            step_size=0.1,
            grad_factor=0.5,
            weight_decay=0.2,
            eps=1e-3,
        )
        g = 0.5 * grad + 0.2 * theta
        np.testing.assert_allclose(total, old + g * g, rtol=1e-12)
        np.testing.assert_allclose(param, theta - 0.1 * g / (np.sqrt(total) + 1e-3), rtol=1e-12)

    @pytest.mark.parametrize("beta1", [0.7, 0.3, 0.0])
    @pytest.mark.parametrize("amsgrad", [False, True])
    def test_adam(self, amsgrad: bool, beta1: float) -> None:
        theta, grad, m = self._values(3)
        v, largest = self._squares(2)
        param, exp_avg, exp_avg_sq, max_exp_avg_sq = (a.copy() for a in (theta, m, v, largest))
        kernel = adam.adam_amsgrad if amsgrad else adam.adam
        self._run(
            kernel,
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            *([max_exp_avg_sq] if amsgrad else []),
            step_size=0.1,
            root_correction=2.0,
            grad_factor=0.5,
            decay_factor=0.9,
            weight_decay=0.2,
            beta1=beta1,
            one_minus_beta1=1 - beta1,
            beta2=0.6,
            one_minus_beta2=0.4,
            eps=1e-3,
        )
        g = 0.5 * grad + 0.2 * 0.9 * theta
        m = beta1 * m + (1 - beta1) * g
        v = 0.6 * v + 0.4 * g * g
        largest = np.maximum(largest, v)
        np.testing.assert_allclose(exp_avg, m, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(exp_avg_sq, v, rtol=1e-12)
        if amsgrad:
            np.testing.assert_allclose(max_exp_avg_sq, largest, rtol=1e-12)
            v = largest
        expected = 0.9 * theta - 0.1 * m / (2 * np.sqrt(v) + 1e-3)
        np.testing.assert_allclose(param, expected, rtol=1e-12, atol=1e-15)

    def test_lamb(self) -> None:
        theta, grad, m = self._values(3)
        (v,) = self._squares(1)
        param, exp_avg, exp_avg_sq = theta.copy(), m.copy(), v.copy()
        both = {
            "average_correction": 3.0,
            "root_correction": 2.0,
            "decay_factor": 0.9,
            "weight_decay": 0.2,
            "eps": 1e-3,
        }
        squares = self._run(
            lamb.lamb_moments,
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            grad_factor=-0.5,
            beta1=0.7,
            beta3=0.3,
            beta2=0.6,
            one_minus_beta2=0.4,
            **both,
        )
        m = 0.7 * m - 0.3 * 0.5 * grad
        v = 0.6 * v + 0.4 * (0.5 * grad) ** 2
        u = 3 * m / (2 * np.sqrt(v) + 1e-3) + 0.2 * 0.9 * theta
        np.testing.assert_array_equal(param, theta)
        np.testing.assert_allclose(exp_avg, m, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(exp_avg_sq, v, rtol=1e-12)
        expected = np.stack([(0.9 * theta) ** 2, u * u], axis=1)
        np.testing.assert_allclose(squares, expected, rtol=1e-10, atol=1e-15)

        self._run(lamb.lamb_update, param, exp_avg, exp_avg_sq, ratio=5.0, lr=0.1, **both)
        np.testing.assert_allclose(param, 0.9 * theta - 0.1 * 5 * u, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(
        ("sums", "most", "adapt", "clip", "expected"),
        [
            ([9.0, 1.0, 16.0, 3.0], np.inf, 1, 0, 2.5),  # sqrt(25) / sqrt(4), of two chunks
            ([9.0, 1.0, 16.0, 3.0], 4.0, 1, 0, 2.0),
            ([9.0, 1.0, 16.0, 3.0], np.inf, 1, 1, 1.0),
            ([1.0, 9.0, 3.0, 16.0], np.inf, 1, 1, 0.4),
            ([9.0, 1.0, 16.0, 3.0], np.inf, 0, 0, 1.0),
            ([0.0, 1.0, 0.0, 3.0], np.inf, 1, 0, 1.0),
        ],
    )
    def test_lamb_ratio(
        self, sums: list[float], most: float, adapt: int, clip: int, expected: float
    ) -> None:
        ratio = np.zeros(1)
        lamb.lamb_ratio(2, np.array(sums), ratio, most, adapt, clip)
        assert ratio == pytest.approx(expected)

    def test_lamb_of_one_row(self) -> None:
        """The three in one; a work-group of plain Python has one lane."""
        theta, grad, m = self._values(3)
        (v,) = self._squares(1)
        numbers = {
            "average_correction": 3.0,
            "root_correction": 2.0,
            "grad_factor": -0.5,
            "decay_factor": 0.9,
            "weight_decay": 0.2,
            "beta1": 0.7,
            "beta3": 0.3,
            "beta2": 0.6,
            "one_minus_beta2": 0.4,
            "lr": 0.1,
            "eps": 1e-3,
            "max_param_norm": np.inf,
            "adapt": 1,
            "clip": 0,
        }
        param, exp_avg, exp_avg_sq = theta.copy(), m.copy(), v.copy()
        lamb.lamb(len(theta), param, grad, exp_avg, exp_avg_sq, **numbers)
        m = 0.7 * m - 0.3 * 0.5 * grad
        v = 0.6 * v + 0.4 * (0.5 * grad) ** 2
        u = 3 * m / (2 * np.sqrt(v) + 1e-3) + 0.2 * 0.9 * theta
        ratio = np.linalg.norm(0.9 * theta) / np.linalg.norm(u)
        np.testing.assert_allclose(exp_avg, m, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(exp_avg_sq, v, rtol=1e-12)
        np.testing.assert_allclose(param, 0.9 * theta - 0.1 * ratio * u, rtol=1e-10, atol=1e-13)

    def test_lamb_ratio_of_an_update_of_zero(self) -> None:
        ratio = np.zeros(1)
        # numpy divides by zero as a device does, and warns, where Python would raise.
        with np.errstate(divide="ignore"):
            lamb.lamb_ratio(1, np.array([4.0, 0.0]), ratio, np.inf, 1, 0)
        assert ratio == 1

    def test_sum_of_squares(self) -> None:
        (grad,) = self._values(1)
        squares = self._run(norm.sum_of_squares, grad)
        np.testing.assert_allclose(np.sum(squares), np.sum(grad**2), rtol=1e-12)


class TestCheck:
    """`python -m fusedoptim.kernels check` sees what changed, without the compiler."""

    @pytest.fixture
    def tree(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        shutil.copytree(modules.FOLDER, tmp_path / "spirv")
        shutil.copytree(build_tool._HERE, tmp_path / "kernels")
        monkeypatch.setattr(build_tool, "FOLDER", tmp_path / "spirv")
        monkeypatch.setattr(build_tool, "MANIFEST", tmp_path / "spirv" / "manifest.json")
        monkeypatch.setattr(build_tool, "_HERE", tmp_path / "kernels")
        return tmp_path

    def test_the_repository_passes(self) -> None:
        assert build_tool.check() == []

    @pytest.mark.parametrize("name", ["sgd.py", "lamb.py"])
    def test_kernel_changed(self, tree: Path, name: str) -> None:
        path = tree / "kernels" / name
        path.write_text(path.read_text() + "\n")
        assert build_tool.check() == [f"{name} changed since it was compiled: run `make kernels`"]

    @pytest.mark.parametrize("name", ["language.py", "_lowering.py", "_compiler.py"])
    def test_compiler_changed(self, tree: Path, name: str) -> None:
        path = tree / "kernels" / name
        path.write_text(path.read_text() + "\n")
        assert build_tool.check() == [
            f"{name} changed since it was compiled: run `make kernels`"
            for name in ("adagrad.py", "adam.py", "lamb.py", "norm.py", "sgd.py")
        ]

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
    def test_modules(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those of one kernel with sums; `make kernels-validate` takes all, and minutes."""
        for path in modules.FOLDER.glob("lamb_moments_*.spv"):
            shutil.copy(path, tmp_path)
        monkeypatch.setattr(build_tool, "FOLDER", tmp_path)
        assert build_tool.validate() == []

    def test_tools_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        assert build_tool.validate() == [
            "not found: spirv-val, ocloc (apt install spirv-tools intel-opencl-icd)"
        ]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", dict.fromkeys(kernel for kernel, _ in shipped()))
def test_module_for_each_variant(kernel: str, variant: str) -> None:
    module = load_module(kernel, variant)
    assert (kernel, module.variant) in shipped()
    of_parameter = {Role.PARAM, Role.GRAD}.intersection(role for _, role in module.arguments)
    if of_parameter == {Role.GRAD} and variant == "split":
        assert module.variant == "bf16"  # what the gradients of a split parameter are
    elif of_parameter:
        assert module.variant == variant
    else:
        assert module.variant == ("f64" if variant == "f64" else "f32")


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
