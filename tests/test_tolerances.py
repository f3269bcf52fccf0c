"""The bounds of tests/tolerances.py hold for rounded arithmetic, and are tight."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tolerances import Bounded, additions, clipping, number, unit_roundoff

U = unit_roundoff(torch.float32)


def _bounded(rounded: Tensor, error: Tensor | float = 0.0) -> Bounded:
    return Bounded(rounded.double(), error, torch.float32)


def _assert_bounds(result: Bounded, rounded: Tensor, units: float) -> None:
    """Assert that ``rounded`` is within the bound, which is at most ``units`` roundoffs wide."""
    assert bool(((rounded.double() - result.value).abs() <= result.error).all())
    assert bool((result.error <= units * 1.001 * U * result.value.abs() + 1e-37).all())


@pytest.mark.parametrize(
    ("operation", "units"),
    [(operator.add, 1), (operator.sub, 1), (operator.mul, 1), (operator.truediv, 5)],
)
def test_one_operation(operation: Callable[[Any, Any], Any], units: float) -> None:
    a, b = torch.randn(2, 10_000)
    _assert_bounds(operation(_bounded(a), _bounded(b)), operation(a, b), units)


def test_square_root() -> None:
    a = torch.rand(10_000)
    _assert_bounds(torch.sqrt(_bounded(a)), torch.sqrt(a), 6)


def test_number_of_the_host() -> None:
    a = torch.randn(10_000)
    _assert_bounds(0.1 * _bounded(a), 0.1 * a, 2)
    _assert_bounds(number(0.1) * _bounded(a), 0.1 * a, 2)
    power = 1 - number(0.999) ** 1
    assert power.error < 1e-15  # 4 ulp of 0.999, in float64
    assert power.value == 1 - 0.999


def test_errors_of_operands_are_handed_on() -> None:
    """Each operand may lie anywhere within its error."""
    a, b = torch.rand(2, 10_000, dtype=torch.float64) + 0.5
    errors = 0.1 * torch.rand(2, 10_000, dtype=torch.float64)
    shifted = torch.stack([a, b]) + errors * (2 * torch.rand(2, 10_000) - 1)
    x, y = (Bounded(value, error, torch.float64) for value, error in zip((a, b), errors))
    for operation in (operator.add, operator.sub, operator.mul, operator.truediv, torch.maximum):
        result = operation(x, y)
        off = (operation(*shifted) - result.value).abs()
        assert bool((off <= result.error).all())
    for function in (torch.sqrt, torch.linalg.vector_norm):
        result = function(x)
        assert bool(((function(shifted[0]) - result.value).abs() <= result.error).all())


def test_no_bound_is_nan() -> None:
    """A quotient whose divisor may be zero has an infinite bound, and so have its products."""
    divisor = Bounded(torch.tensor([1.0, 1e-9], dtype=torch.float64), 1e-8, torch.float32)
    quotient = _bounded(torch.zeros(2)) / divisor
    for result in (quotient, 0.1 * quotient, quotient * quotient, 1 - quotient):
        assert result.error.isfinite().tolist() == [True, False]
        assert not bool(result.error.isnan().any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored(dtype: torch.dtype) -> None:
    a = torch.randn(10_000)
    result = _bounded(a).stored(dtype)
    off = (a.to(dtype).double() - a.double()).abs()
    assert bool((off <= result.error).all())
    assert (off / result.error).max() > 0.9


def test_norm() -> None:
    a = torch.randn(100_000)
    result = torch.linalg.vector_norm(_bounded(a))
    total = torch.zeros(16)
    for chunk in a.split(32 * 1024):  # as the kernels: lane by lane, one after the other
        lanes = torch.zeros(16)
        for row in chunk.split(16):
            lanes[: len(row)] += row * row
        total = total + lanes
    _assert_bounds(result, total.sum().sqrt(), additions([100_000]))


def test_additions() -> None:
    assert additions([16]) == 1 + 1 + 16
    assert additions([100_000, 5]) == 2048 + 5 + 16
    assert additions([]) == 16


def test_clipping_is_relative() -> None:
    grads = [torch.full((4,), 3.0, dtype=torch.float64)]
    for limit, least, most in ((0.5, 10 * U, 100 * U), (100.0, 0.0, 0.0)):
        result = clipping(grads, limit, torch.float32)
        assert result.value == 1
        assert least <= result.error <= most


def test_divisor_that_may_be_zero() -> None:
    a = Bounded(torch.tensor([1.0, 2.0], dtype=torch.float64), 1.5, torch.float32)
    assert (1 / a).error.tolist()[0] == math.inf
    assert (1 / a).error[1].isfinite()
