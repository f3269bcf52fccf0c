"""Moments in reduced dtypes: sizes around their blocks, and how they are read and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fusedoptim.kernels import rounding
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.step import float8

MOMENTS = ("exp_avg", "exp_avg_sq")
REDUCED = (torch.bfloat16, "float8")
each_dtype = pytest.mark.parametrize("state_dtype", REDUCED, ids=str)
LANES = BACKENDS["cpu"].shape.lanes
TILE = rounding.BLOCK * LANES
# Sizes around the lanes, a draw of the words, a block, a tile and a chunk.
SIZES = (1, 15, 17, 255, 256, 257, TILE - 1, TILE, TILE + 1, 8 * TILE + 300)


def assert_same_values(one: Tensor, other: Tensor) -> None:
    """Assert that values are equal, with NaN in the same places."""
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def vectors(sizes: Sequence[int], seed: int = 0) -> list[Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(size, generator=generator)) for size in sizes]


def values_of(optimizer: Any, param: Tensor) -> dict[str, Tensor]:
    """The moments of a parameter in float64."""
    state = float8.readable(optimizer.state[param])
    return {name: state[name].double() for name in MOMENTS}
