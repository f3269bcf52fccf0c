"""The kernels' self-test: right kernels pass, and every small error is found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import allocator
from fusedoptim.doctor import _self_test
from fusedoptim.doctor._self_test import FORMULAS, kernel_problem
from fusedoptim.launch import modules
from fusedoptim.launch.table import LaunchBlock


@pytest.fixture(scope="module")
def queue() -> Any:
    return allocator.queue("cpu")


def test_every_kernel_has_a_formula() -> None:
    assert {name.rpartition("_")[0] for name in modules._manifest()} == set(FORMULAS)


@pytest.mark.parametrize("kernel", FORMULAS)
def test_an_error_of_2_to_the_minus_16_is_found(
    queue: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any one of a kernel's results, and without it the kernel passes."""
    name = f"{kernel}_f32"
    assert kernel_problem(queue, name, in_usm=False) == ""
    formula = FORMULAS[kernel]
    names: list[str] = []
    monkeypatch.setitem(FORMULAS, kernel, lambda a: names.extend(r := formula(a)) or r)
    kernel_problem(queue, name, in_usm=False)
    for result in set(names):

        def slightly_off(a: Any, result: str = result) -> dict[str, Any]:
            results = formula(a)
            magnitude = np.maximum(abs(results[result]), 1)
            return results | {result: results[result] + magnitude * 2.0**-16}

        monkeypatch.setitem(FORMULAS, kernel, slightly_off)
        problem = kernel_problem(queue, name, in_usm=False)
        assert f"values of {result!r} are wrong" in problem


@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16", "split"])
def test_other_dtypes(queue: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is written to where nothing should be: 2 units of a last place are found."""
    name = f"sgd_momentum_{dtype}"
    assert kernel_problem(queue, name, in_usm=False) == ""
    unit = {"f64": 2.0**-45, "bf16": 2.0**-6, "f16": 2.0**-9, "split": 2.0**-16}[dtype]
    formula = FORMULAS["sgd_momentum"]

    def off(a: Any) -> dict[str, Any]:
        results = formula(a)
        return results | {"param": results["param"] * (1 + unit) + np.sign(results["param"]) * unit}

    monkeypatch.setitem(FORMULAS, "sgd_momentum", off)
    assert "values of 'param' are wrong" in kernel_problem(queue, name, in_usm=False)


def test_in_memory_of_the_driver(queue: Any) -> None:
    assert kernel_problem(queue, "lamb_moments_f32", in_usm=True) == ""
    assert kernel_problem(queue, "sgd_split", in_usm=True) == ""


def test_nan_is_found(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    number = _self_test._Trial._new_number

    def with_nan(self: Any, argument: Any) -> Any:
        return float("nan") if argument.name == "lr" else number(self, argument)

    monkeypatch.setattr(_self_test._Trial, "_new_number", with_nan)
    problem = kernel_problem(queue, "sgd_f32", in_usm=False)
    assert "values of 'param' are wrong: element 0 is nan" in problem


def test_a_write_past_the_end_is_found(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def longer(kernel: Any, lengths: Any) -> LaunchBlock:
        return LaunchBlock(kernel, lengths + np.array([0, 0, 1]))

    monkeypatch.setattr(_self_test, "LaunchBlock", longer)
    problem = kernel_problem(queue, "adagrad_f32", in_usm=False)
    assert problem in ("wrote past the end of 'param'", "wrote past the end of 'sum'")


def test_a_launch_that_does_nothing_is_found(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchBlock, "launch", lambda self: None)
    for kernel in FORMULAS:
        assert "are wrong" in kernel_problem(queue, f"{kernel}_f32", in_usm=False)


def test_a_kernel_without_a_formula(queue: Any) -> None:
    assert "no formula" in kernel_problem(queue, "other_f32", in_usm=False)
