"""The kernels' self-test: right kernels pass, and every small error is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import allocator
from fusedoptim.doctor import _self_test
from fusedoptim.doctor._examples import EXAMPLES
from fusedoptim.doctor._self_test import kernel_problem
from fusedoptim.dtypes import ELEMENTS
from fusedoptim.kernels.language import Role
from fusedoptim.launch import modules
from fusedoptim.launch.block import LaunchBlock


@pytest.fixture(scope="module")
def queue() -> Any:
    return allocator.queue("cpu")


KERNELS = sorted({kernel for kernel, _ in modules.shipped()})
RESULTS = (Role.PARAM, Role.STATE, Role.OUTPUT, Role.VALUES, Role.INDICES, Role.SUMS, Role.RESULT)


def perturb(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], name: str) -> list[str]:
    """Change what a kernel should write to ``name``; the list gets ``name`` if it writes it."""
    in_float64 = _self_test.in_float64
    written: list[str] = []

    def changed(function: Any, module: Any, values: Any, *rest: Any) -> Any:
        results = in_float64(function, module, values, *rest)
        if not np.array_equal(results[name], values[name]):  # else the kernel only reads it
            results[name] = change(results[name])
            written.append(name)
        return results

    monkeypatch.setattr(_self_test, "in_float64", changed)
    return written


@pytest.mark.parametrize("element", ["f16", "f32", "f64"])
def test_numbers_are_decoded(element: str) -> None:
    """All numbers are decoded, including subnormal ones, infinity and NaN."""
    size, fraction = ELEMENTS[element].size, ELEMENTS[element].fraction
    bits = np.random.default_rng().integers(0, 1 << 8 * size, 10_000, dtype=f"u{size}")
    bits[:5000] &= (1 << fraction) - 1
    bits[5000:6000] |= ((1 << 8 * size - 1 - fraction) - 1) << fraction
    bits[5500:6000] &= ((1 << 8 * size - fraction) - 1) << fraction
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = bits.view(f"f{size}").astype(np.float64)
    np.testing.assert_array_equal(_self_test._decode(bits, element), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_an_error_of_2_to_the_minus_16_is_found(
    queue: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in any one of a kernel's results is found, and without it the kernel passes."""
    name = f"{kernel}_f32"
    assert kernel_problem(queue, name, in_usm=False) == ""
    arguments = modules.load_module(kernel, "f32").arguments
    found = []
    scratch = EXAMPLES[kernel](np.random.default_rng()).scratch if kernel in EXAMPLES else ()
    results = [name for name, role in arguments if role in RESULTS and name not in scratch]
    for result in results:
        with monkeypatch.context() as patch:
            written = perturb(patch, lambda x: x + np.maximum(abs(x), 1) * 2.0**-16, result)
            problem = kernel_problem(queue, name, in_usm=False)
        assert (f"values of {result!r} are wrong" in problem) == bool(written)
        found += written
    assert found


@pytest.mark.parametrize("dtype", ["f64", "bf16", "f16", "split"])
def test_other_dtypes(queue: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are found in other dtypes too: in 16-bit ones, 2 units in the last place."""
    name = f"sgd_momentum_{dtype}"
    assert kernel_problem(queue, name, in_usm=False) == ""
    unit = {"f64": 2.0**-45, "bf16": 2.0**-6, "f16": 2.0**-9, "split": 2.0**-16}[dtype]
    perturb(monkeypatch, lambda x: x * (1 + unit) + np.sign(x) * unit, "param")
    assert "values of 'param' are wrong" in kernel_problem(queue, name, in_usm=False)


@pytest.mark.parametrize("name", ["grad", "grad_factor"])
def test_a_write_to_what_is_only_read_is_found(
    queue: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = _self_test._Trial._launch

    def writing(trial: Any) -> None:
        launch(trial)
        values = trial._arrays[name]._values
        values[-1] = np.nextafter(values[-1], np.float32(9))

    monkeypatch.setattr(_self_test._Trial, "_launch", writing)
    problem = kernel_problem(queue, "sgd_f32", in_usm=False)
    assert f"1 of {5513 if name == 'grad' else 1} values of {name!r} are wrong" in problem


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
    for kernel in KERNELS:
        assert "are wrong" in kernel_problem(queue, f"{kernel}_f32", in_usm=False)


def test_a_kernel_that_is_not_shipped(queue: Any) -> None:
    assert "is not a kernel" in kernel_problem(queue, "other_f32", in_usm=False)
