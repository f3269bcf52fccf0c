"""What a single rounding, a function or a sum may be off by, for each dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

ARITHMETIC = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# Units in the last place, each 2 u, by which OpenCL C's functions of a float may be off (OpenCL C
# specification, "Relative Error as ULPs", full profile).
BUILTIN_ULPS = {"exp": 3, "log": 3, "sin": 4, "cos": 4, "tanh": 5, "erf": 16, "sqrt": 3, "pow": 16}
# CPU.shape of fusedoptim.launch.cpu: a lane adds up CHUNK / LANES terms of a chunk. A GPU's lane
# adds up fewer.
LANES = 16
CHUNK = 32 * 1024


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


def by_hand(expected: Any, roundings: int, dtype: torch.dtype = torch.float64) -> Any:
    """Equal to a number computed by hand, or a list of them, up to so many roundings.

    The kernels' arithmetic and that of the expression in the test may each round so often.
    """
    return pytest.approx(expected, rel=roundings * unit_roundoff(dtype), abs=0.0)


def additions(sizes: Sequence[int]) -> int:
    """The most additions that a term passes through in a sum over tensors of these sizes.

    A lane adds its terms of a chunk. Its sums of the chunks are added, at worst one after the
    other, and then those of the lanes.
    """
    chunks = sum(math.ceil(size / CHUNK) for size in sizes)
    return math.ceil(min(max(sizes, default=0), CHUNK) / LANES) + chunks + LANES
