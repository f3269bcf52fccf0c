"""The kernels' sources, their compiled modules, and the checks that hold the two together."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import operator
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fusedoptim.dtypes import VARIANTS
from fusedoptim.kernels import __main__ as build_tool
from fusedoptim.kernels import adagrad, adam, lamb, language, norm, sgd
from fusedoptim.kernels.language import Role
from fusedoptim.launch import modules, parts
from fusedoptim.launch.layout import INTEGERS
from fusedoptim.launch.modules import ModuleError, load_module, shipped
from tests.optimizer_cases import ADAGRAD, ADAM, LAMB, SGD, Kwargs, OptimizerCase

SOURCES = [path.name for path in build_tool.kernel_files()]
HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None

LENGTH, T = 9, 3
_BETA2 = 0.6
_BETAS = {"betas": (0.7, _BETA2), "eps": 1e-3, "weight_decay": 0.2}
_MOMENTUM = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True}
_DECOUPLED = {"decay_factor": 1 - 0.1 * 0.2, "weight_decay": 0.0}


def _numbers(beta1: float) -> Kwargs:
    """The numbers that Adam's and Lamb's kernels get at step T."""
    return {
        "lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "decay_factor": 1.0,
        "beta1": beta1, "one_minus_beta1": 1 - beta1, "beta3": 1 - beta1,
        "beta2": _BETA2, "one_minus_beta2": 1 - _BETA2,
        "root_correction": (1 - _BETA2**T) ** -0.5,
        "average_correction": 1 / (1 - beta1**T), "step_size": 0.1 / (1 - beta1**T),
        "max_param_norm": np.inf, "adapt": True, "clip": False,
    }  # fmt: skip


# Kernels, the numbers that they get, and the reference's hyper-parameters other than lr=0.1.
INTERPRETED: list[tuple[Callable[..., Any], OptimizerCase, Kwargs, Kwargs]] = [
    (sgd.sgd, SGD, {"lr": 0.1, "weight_decay": 0.2}, {"weight_decay": 0.2}),
    *(
        (sgd.sgd_momentum, SGD, _MOMENTUM | {"one_minus_dampening": 0.5, "fresh": fresh},
         _MOMENTUM | {"dampening": 0.5})
        for fresh in (False, True)
    ),
    (adagrad.adagrad, ADAGRAD, {"step_size": 0.1, "weight_decay": 0.2, "eps": 1e-3},
     {"weight_decay": 0.2, "eps": 1e-3}),
    *(
        (kernel, ADAM, _numbers(beta1),
         _BETAS | {"betas": (beta1, _BETA2), "amsgrad": kernel is adam.adam_amsgrad})
        for kernel in (adam.adam, adam.adam_amsgrad)
        for beta1 in (0.7, 0.3, 0.0)
    ),
    (adam.adam, ADAM, _numbers(0.7) | _DECOUPLED, _BETAS | {"decoupled_weight_decay": True}),
    *(
        (kernel, LAMB, _numbers(0.7) | numbers, _BETAS | options)
        # lamb_update stands for the kernels of larger tensors, lamb_step for those among processes.
        for kernel in (lamb.lamb, lamb.lamb_update, lamb.lamb_step)
        for numbers, options in (
            ({}, {}),
            (_DECOUPLED, {"decoupled_decay": True}),
            ({"clip": True}, {"trust_clip": True}),
            ({"max_param_norm": 0.5}, {"max_param_norm": 0.5}),
            ({"adapt": False, "weight_decay": 0.0}, {"always_adapt": False, "weight_decay": 0.0}),
        )
    ),
]  # fmt: skip

# Kernels with parameters that have no row above, and what compares them with a reference.
ELSEWHERE = {
    "lamb_moments": "the rows of lamb_update",
    "lamb_norms": "the rows of lamb_step",
    **dict.fromkeys(("adam_bfloat16", "adam_float8"), "tests/fusedoptim/test_state_rounding.py"),
    **dict.fromkeys(
        ("sgd_rows", "adagrad_rows", "rowwise_adagrad_rows"),
        "tests/fusedoptim/nn/test_embedding_bag_updates.py",
    ),
}


class TestInterpreted:
    """A kernel is plain Python: called with numpy arrays, it updates one element."""

    @pytest.mark.parametrize(("kernel", "case", "numbers", "options"), INTERPRETED)
    def test_equals_the_reference(
        self, kernel: Callable[..., Any], case: OptimizerCase, numbers: Kwargs, options: Kwargs
    ) -> None:
        theta, grad, *averages = np.random.default_rng().normal(size=(4, LENGTH))
        squares = np.random.default_rng().uniform(0.1, 2.0, (3, LENGTH))
        state = dict(zip(("exp_avg", "momentum_buffer"), averages))
        state |= dict(zip(("exp_avg_sq", "max_exp_avg_sq", "sum"), squares))
        expected_state = {key: torch.tensor(value) for key, value in state.items()}
        if numbers.get("fresh"):
            del expected_state["momentum_buffer"]
        expected = case.algorithm(
            torch.tensor(theta),
            torch.tensor(-0.5 * grad),
            expected_state,
            1 if case is ADAGRAD else T,
            **options | {"lr": 0.1},
        )
        given = {"param": theta, "grad": grad, "grad_factor": -0.5, **state, **numbers}
        if kernel is lamb.lamb_update:
            self._run_sums_and_ratio(lamb.lamb_moments, given)
        if kernel is lamb.lamb_step:
            before = averages[0].copy(), squares[0].copy()
            self._run_sums_and_ratio(lamb.lamb_norms, given)
            np.testing.assert_array_equal((given["exp_avg"], given["exp_avg_sq"]), before)
        self._run(kernel, given)
        np.testing.assert_allclose(theta, expected, rtol=1e-10, atol=1e-13)
        for key, value in expected_state.items():
            np.testing.assert_allclose(state[key], value, rtol=1e-12, atol=1e-15)

    def test_each_optimizers_kernel_has_a_row(self) -> None:
        interpreted = {kernel.__name__ for kernel, *_ in INTERPRETED}
        with_params = {
            name
            for name, variant in shipped()
            if Role.PARAM in {role for _, role in load_module(name, variant).arguments}
        }
        assert interpreted.isdisjoint(ELSEWHERE)
        assert with_params == interpreted | ELSEWHERE.keys()

    @staticmethod
    def _run(kernel: Callable[..., Any], given: Kwargs) -> list[Any]:
        """Call ``kernel`` for each element, with those of the arguments that it takes."""
        names, everything = inspect.signature(kernel).parameters, {"length": LENGTH, **given}
        chosen = {name: everything[name] for name in names if name != "i"}
        if "i" not in names:
            return [kernel(**chosen)]
        return [kernel(i=i, **chosen) for i in range(LENGTH)]

    def _run_sums_and_ratio(self, summing: Callable[..., Any], given: Kwargs) -> None:
        """Run the first two of Lamb's kernels, with the sums of two chunks."""
        before = given["param"].copy()
        squares = np.array(self._run(summing, given))
        np.testing.assert_array_equal(given["param"], before)
        np.testing.assert_allclose(squares[:, 0], (given["decay_factor"] * before) ** 2, rtol=1e-12)
        given["ratio"] = np.zeros(1)
        sums = np.concatenate([squares[:4].sum(0), squares[4:].sum(0)])
        self._run(lamb.lamb_ratio, given | {"length": 2, "sums": sums})
        given["ratio"] = given["ratio"][0]

    @pytest.mark.parametrize("sums", [[0.0, 1.0, 0.0, 3.0], [4.0, 0.0, 0.0, 0.0]])
    def test_ratio_where_a_norm_is_zero(self, sums: list[float]) -> None:
        ratio = np.zeros(1)
        # numpy divides by zero as a device does, and warns, where Python would raise.
        with np.errstate(divide="ignore"):
            lamb.lamb_ratio(2, np.array(sums), ratio, np.inf, 1, 0)
        assert ratio == 1

    def test_sum_of_squares(self) -> None:
        grad = np.random.default_rng().normal(size=LENGTH)
        squares = self._run(norm.sum_of_squares, {"grad": grad})
        np.testing.assert_allclose(np.sum(squares), np.sum(grad**2), rtol=1e-12)


class TestCheck:
    """`python -m fusedoptim.kernels check` finds what changed, without the compiler."""

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

    @pytest.mark.parametrize(
        ("name", "changed"),
        [(name, [name]) for name in ("sgd.py", "lamb.py")]
        + [(name, SOURCES) for name in build_tool._COMPILER_SOURCES],
    )
    def test_source_changed(self, tree: Path, name: str, changed: list[str]) -> None:
        path = tree / "kernels" / name
        path.write_text(path.read_text() + "\n")
        expected = [f"{name} changed since it was compiled: run `make kernels`" for name in changed]
        assert build_tool.check() == expected

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (
                lambda tree: shutil.copy(tree / "kernels/sgd.py", tree / "kernels/new.py"),
                "new.py has no compiled module",
            ),
            (
                lambda tree: (tree / "spirv/sgd_f32.spv").write_bytes(b"changed"),
                "sgd_f32.spv is not the module that was built",
            ),
            (lambda tree: (tree / "spirv/sgd_f32.spv").unlink(), "sgd_f32.spv is missing"),
            (
                lambda tree: (tree / "spirv/other_f32.spv").touch(),
                "other_f32.spv is not in the manifest",
            ),
        ],
    )
    def test_file_changed(self, tree: Path, change: Callable[[Path], Any], problem: str) -> None:
        change(tree)
        assert build_tool.check() == [f"{problem}: run `make kernels`"]

    def test_source_removed(self, tree: Path) -> None:
        (tree / "kernels" / "sgd.py").unlink()
        assert any("sgd.py is gone" in problem for problem in build_tool.check())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kernel", dict.fromkeys(kernel for kernel, _ in shipped()))
def test_module_for_each_variant(kernel: str, variant: str) -> None:
    of_float32 = {role for _, role in load_module(kernel, "f32").arguments}
    if variant == "f64" and of_float32 & {Role.STATE_BF16, Role.STATE_E4M3}:
        with pytest.raises(ModuleError, match="has no kernel"):  # such state remains float64
            load_module(kernel, variant)
        return
    module = load_module(kernel, variant)
    assert (kernel, module.variant) in shipped()
    roles = {role for _, role in module.arguments}
    has_values = roles.intersection({Role.PARAM, Role.GRAD, Role.INPUT, Role.OUTPUT})
    if variant == "split" and has_values and Role.PARAM not in roles:
        assert module.variant == "bf16"  # as the gradients of a split parameter are
    elif has_values:
        assert module.variant == variant
    elif roles <= {*INTEGERS, Role.INDICES, Role.ROW_INT, Role.DEVICE_INT}:
        assert module.variant == "f32"  # one module serves all variants
    else:
        assert module.variant == ("f64" if variant == "f64" else "f32")


@pytest.mark.skipif(not HAS_COMPILER, reason="pip install '.[jit]'")
class TestCompiler:
    def test_fresh_build_equals_the_repositorys(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Only one source is compiled here; `make kernels-verify` compares all."""
        before = {path.name: path.read_bytes() for path in build_tool.FOLDER.iterdir()}
        monkeypatch.setattr(build_tool, "FOLDER", tmp_path)
        monkeypatch.setattr(build_tool, "MANIFEST", tmp_path / "manifest.json")
        monkeypatch.setattr(build_tool, "CODE", tmp_path / "code")
        monkeypatch.setattr(build_tool, "kernel_files", lambda: [Path(norm.__file__)])
        (tmp_path / "stale.spv").write_bytes(b"")
        assert build_tool.build() == []
        assert build_tool.check() == []
        assert not (tmp_path / "stale.spv").exists()
        modules = json.loads((tmp_path / "manifest.json").read_text())["modules"]
        for entry in modules.values():
            spirv = (tmp_path / entry["file"]).read_bytes()
            assert hashlib.sha256(spirv).hexdigest() == entry["sha256"]
        built = {path.name: path.read_bytes() for path in tmp_path.glob("*.spv")}
        of_norm = {entry["file"] for entry in modules.values()}
        assert built.keys() == of_norm == {name for name in before if name in of_norm}
        assert [name for name in built if built[name] != before[name]] == []
        assert (tmp_path / "code").read_bytes() == parts.CODE.read_bytes()
        manifest = json.loads(before["manifest.json"])["modules"]
        assert modules == {
            name: entry for name, entry in manifest.items() if entry["source"] == "norm.py"
        }

    def test_kernels_take_no_longer_for_those_before_them(self) -> None:
        """Every kernel has equally many implementations of an operator to search through."""
        from fusedoptim.kernels._compiler import SPIRVKernelDispatcher, compile_kernel

        context, counts = SPIRVKernelDispatcher.targetdescr.target_context, []
        for _ in range(2):
            compile_kernel(norm.sum_of_squares, "f32", "kernel_f32")
            counts.append(len(context._defns[operator.add].versions))
        assert counts[0] == counts[1]

    def test_verify(self, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = build_tool.FOLDER
        files = {
            folder / "sgd_f32.spv": load_module("sgd", "f32").spirv,
            folder / "sgd_f64.spv": b"another",
        }
        manifest = json.loads(build_tool.MANIFEST.read_text())
        monkeypatch.setattr(build_tool, "_compile_all", lambda: (manifest, files))
        problem = "sgd_f64.spv differs from a fresh build: run `make kernels`"
        assert build_tool.verify() == [problem]
        manifest["version"] = 0
        assert build_tool.verify()[0].startswith("manifest.json differs from a fresh build")

    def test_argument_without_a_type(self) -> None:
        from fusedoptim.kernels._compiler import compile_kernel

        def kernel(length: language.Length, step) -> None:  # type: ignore[no-untyped-def]
            pass

        with pytest.raises(TypeError, match="'step' has no type"):
            compile_kernel(kernel, "f32", "kernel_f32")

    def test_argument_with_a_name_of_the_loop(self) -> None:
        from fusedoptim.kernels._compiler import compile_kernel

        def kernel(length: language.Length, end: language.Integer) -> None:
            pass

        with pytest.raises(TypeError, match="'end' has the name of a variable"):
            compile_kernel(kernel, "f32", "kernel_f32")


@pytest.mark.skipif(HAS_COMPILER, reason="the compiler is installed")
@pytest.mark.parametrize("command", [build_tool.build, build_tool.verify])
def test_compiler_missing(command: Callable[[], list[str]]) -> None:
    with pytest.raises(ImportError, match=r"pip install '\.\[jit\]' in a clone"):
        command()
