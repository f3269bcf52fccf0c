"""Whether all values of a tensor are finite."""

from __future__ import annotations

import pytest
import torch

from tests.optimizer_cases import FLOATS
from transforms.rewrites.finite import is_finite

_INF, _NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrong", [(), (_INF,), (-_INF,), (_NAN,), (_INF, -_INF), (_NAN, _INF)])
@pytest.mark.parametrize("size", [2, 17, 1000])
def test_finds_each_wrong_value(dtype: torch.dtype, wrong: tuple[float, ...], size: int) -> None:
    values = torch.randn(size).to(dtype)
    values[torch.randperm(size)[: len(wrong)]] = torch.tensor(wrong, dtype=dtype)
    assert is_finite(values) is not bool(wrong)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (64, 2)])
def test_largest_values_are_finite(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    largest = torch.finfo(dtype).max
    assert is_finite(torch.full(shape, largest, dtype=dtype))
    assert is_finite(torch.full(shape, -largest, dtype=dtype))
