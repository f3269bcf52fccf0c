r"""torch's INT8 operators of oneDNN, and how values become 8-bit codes.

A value :math:`x` has the code :math:`q = \mathrm{round}(x / s) + z`, with a scale :math:`s` and a
zero point :math:`z` for a whole activation. A weight has a scale for each output channel, and the
zero point 0. Codes of activations have 8 bits where the processor sums products of codes in 32 bits
(VNNI or AMX). Elsewhere oneDNN adds two products in 16 bits, and that sum may saturate. With codes
of 7 bits it cannot.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedoptim.raw import ElementwiseKernel
from transforms.rewrites.finite import is_finite
from transforms.rewrites.schemas import changed
from transforms.rewrites.watched_parameter import detached

_LARGEST_WEIGHT = 127  # -128 is not used: two products of it would not fit 16 bits
_LEAST_SCALE = 2.0**-100  # its inverse is finite


class Grid(NamedTuple):
    """The codes of an activation."""

    scale: float
    zero_point: int
    largest: int
    """The largest code; the smallest is 0."""

    @classmethod
    def over(cls, low: float, high: float) -> Grid:
        """The grid for values from ``low`` to ``high``, and 0, on this processor."""
        low, high = min(low, 0.0), max(high, 0.0)
        largest = 2 ** code_bits() - 1
        scale = float(np.float32((high - low) / largest))  # rounded as the operators do
        if scale < _LEAST_SCALE:
            return cls(1.0, 0, largest)  # all values are 0, or as good as 0
        return cls(scale, min(round(-low / scale), largest), largest)


class Codes(NamedTuple):
    """A quantized weight."""

    values: Tensor
    """int8, of the weight's shape."""
    scales: Tensor
    """float32, of each output channel."""


@functools.cache
def code_bits() -> int:
    """Bits of an activation's code: 8, or 7 where oneDNN's sums of two products saturate.

    As that depends on the processor and on the variable ONEDNN_MAX_CPU_ISA, it is tried out.
    """
    grid = Grid(1.0, 0, 255)
    rows = torch.full((16, 256), grid.largest, dtype=torch.uint8)
    weight = torch.full((16, 256), _LARGEST_WEIGHT, dtype=torch.int8)
    scales = torch.ones(16, dtype=torch.float32)
    product = linear(rows, grid, pack_linear(weight), scales, None, Result(torch.float32))
    exact = 256 * grid.largest * _LARGEST_WEIGHT
    return 8 if bool((product == exact).all()) else 7


def quantized_weight(weight: Tensor) -> Codes | None:
    """The codes of a weight, symmetric in each output channel; None if one is not finite."""
    values = detached(weight).float()
    rows = values.flatten(1)
    largest = rows.abs().amax(1) if rows.numel() else rows.new_zeros(len(rows))
    if not is_finite(largest):
        return None
    scales = largest / _LARGEST_WEIGHT
    scales = torch.where(scales < _LEAST_SCALE, 1.0, scales)
    shape = (-1,) + (1,) * (values.dim() - 1)
    codes = (values / scales.view(shape)).round_().clamp_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT)
    return Codes(codes.to(torch.int8).contiguous(), scales)


_quantize = ElementwiseKernel(
    "T x, float32 inverse, float32 zero_point, float32 largest",
    "uint8 code, raw int32 beyond",
    """
    const float value = x;
    if (!isfinite(value)) beyond[0] = 1;
    code = convert_uchar_sat_rte(fmin(fma(value, inverse, zero_point), largest));
    """,
    "quantize_activation",
)


def quantized_activation(x: Tensor, grid: Grid) -> Tensor | None:
    """The codes of an activation, in its order in memory; None if one is not finite.

    Values beyond the grid get its first or last code.

    Args:
        x: float32 or bfloat16, on the CPU, without gradients, and not empty.
        grid: the grid of the codes.
    """
    if not _is_dense(x):
        x = x.contiguous()
    codes = torch.empty_like(x, dtype=torch.uint8)
    beyond = torch.zeros(1, dtype=torch.int32)
    inverse = float(np.float32(1 / grid.scale))
    _quantize(
        _in_memory(x),
        inverse,
        float(grid.zero_point),
        float(grid.largest),
        _in_memory(codes),
        beyond,
    )
    return None if beyond.item() else codes


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill one piece of memory without overlapping."""
    return (
        x.is_contiguous()
        or x.is_contiguous(memory_format=torch.channels_last)
        or torch.ops.aten.is_non_overlapping_and_dense.default(x)
    )


def _in_memory(x: Tensor) -> Tensor:
    """The elements of a dense tensor in their order in memory."""
    return x.as_strided((x.numel(),), (1,))


def pack_linear(codes: Tensor) -> Tensor:
    """The weight of a Linear in oneDNN's layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(codes, None)
    return packed


class Result(NamedTuple):
    """The form in which an operator returns a product."""

    dtype: torch.dtype
    """The dtype of its elements; uint8 for codes."""
    scale: float = 1.0
    zero_point: int = 0
    activation: str = "none"
    """oneDNN's name of the activation that is applied first."""
    scalars: Sequence[float] = ()
    algorithm: str = ""


OF_LINEARS = frozenset({"relu", "hardtanh", "swish", "hardswish", "tanh", "leaky_relu", "gelu"})
"""The activations that the operator of a Linear applies."""
OF_CONVOLUTIONS: Mapping[int, frozenset[str]] = {
    1: frozenset({"relu"}),
    2: frozenset({"relu", "hardtanh", "swish", "hardswish"}),
    3: frozenset(),
}
"""Those that the operator of a convolution applies, by the number of an image's dimensions."""


def linear(
    x: Tensor, grid: Grid, weight: Tensor, scales: Tensor, bias: Tensor | None, result: Result
) -> Tensor:
    """The product of the codes of ``x`` and a packed weight."""
    zeros = _zero_points(len(scales))
    dtype, scale, zero_point, *how = result
    y: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *(x, grid.scale, grid.zero_point, weight, scales, zeros, bias),
        *(scale, zero_point, dtype, *how),
    )
    return y


@functools.cache
def _zero_points(channels: int) -> Tensor:
    """The zero points of a weight, which the operators only read."""
    with torch.inference_mode(False):  # they outlive the caller's mode
        return torch.zeros(channels, dtype=torch.int64)


class Geometry(NamedTuple):
    """The geometry of a convolution: one number for each dimension of the image, and the groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def pack_convolution(codes: Codes, grid: Grid, geometry: Geometry, shape: list[int]) -> Tensor:
    """The weight of a convolution in oneDNN's layout for inputs of this shape."""
    packed: Tensor = torch.ops.onednn.qconv_prepack(
        codes.values, codes.scales, grid.scale, grid.zero_point, *geometry, shape
    )
    return packed


def convolution(
    x: Tensor,
    grid: Grid,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    result: Result,
) -> Tensor:
    """The convolution of the codes of ``x`` with a packed weight, channels last."""
    zeros = _zero_points(len(scales))
    dtype, scale, zero_point, *how = result
    y: Tensor = torch.ops.onednn.qconv_pointwise.default(
        *(x, grid.scale, grid.zero_point, weight, scales, zeros, bias, *geometry),
        *(scale, zero_point, dtype, *how),
    )
    return y


def objection() -> str | None:
    """Why this torch cannot be used, if it cannot: an operator is absent or different."""
    absent = changed("onednn", _SCHEMAS)
    if absent:
        return (
            f"torch {torch.__version__} differs from torch 2.13 in "
            f"{', '.join(f'onednn::{name}' for name in absent)}: INT8 needs those of torch 2.13"
        )
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # untyped in torch
        return f"torch {torch.__version__} was built without oneDNN, which computes INT8"
    return None


_SCHEMAS = {
    "qlinear_prepack": "onednn::qlinear_prepack(Tensor weight, int[]? x_shape) -> Tensor",
    "qlinear_pointwise": (
        "onednn::qlinear_pointwise(Tensor qx, float x_scale, int x_zero_point, Tensor qw, "
        "Tensor w_scale, Tensor w_zero_point, Tensor? bias, float output_scale, "
        "int output_zero_point, ScalarType? output_dtype, str post_op_name, "
        "Scalar?[] post_op_args, str post_op_algorithm) -> Tensor"
    ),
    "qconv_prepack": (
        "onednn::qconv_prepack(Tensor weight, Tensor w_scales, float x_scale, int x_zp, "
        "int[] stride, int[] padding, int[] dilation, int groups, int[]? x_shape=None) -> Tensor"
    ),
    "qconv_pointwise": (
        "onednn::qconv_pointwise(Tensor qx, float x_scale, int x_zero_point, Tensor qw, "
        "Tensor w_scale, Tensor w_zero_point, Tensor? bias, int[] stride, int[] padding, "
        "int[] dilation, int groups, float output_scale, int output_zero_point, "
        "ScalarType? output_dtype, str attr, Scalar?[] scalars, str? algorithm) -> Tensor"
    ),
}
"""The schemas as in torch 2.13. An operator that a newer torch changes is not called."""
