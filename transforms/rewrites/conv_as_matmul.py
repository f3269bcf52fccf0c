"""Convolutions that compute small images as products of matrices in training.

For images that are not quite as small, only the gradient of the weight is a product. torch computes
everything else: large images, evaluation, other devices and dtypes, subclasses of Tensor,
``torch.func``, forward-mode differentiation, compiling, tracing, export, and calls inside a
dispatch mode or function mode of the user.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedoptim._processor import has_tiles
from fusedoptim._torch_private import has_bfloat16_products
from fusedoptim.ops._conv2d import conv2d, output_size
from transforms.rewrites import onednn_products
from transforms.rewrites.for_training import ForTraining, are_plain, is_computed
from transforms.rewrites.packed import is_plain_call

LEAST_WEIGHT = 1 << 18
"""Elements of a weight from which products of matrices gain more than their calls cost."""


class Limits(NamedTuple):
    """The pixels of the largest output for which products are faster than oneDNN's convolutions."""

    whole: int
    """If all are products: the output and both gradients."""
    weight: int
    """If only the gradient of the weight is one."""


class _OfTaps(NamedTuple):
    """The limits of kernels of one pixel and of larger ones, for which patches are copied."""

    one: Limits
    several: Limits


_NONE = _OfTaps(Limits(0, 0), Limits(0, 0))
_BFLOAT16 = _OfTaps(Limits(7 * 7, 8 * 8), Limits(0, 7 * 7))
_BFLOAT16_BY_TILES = _OfTaps(Limits(8 * 8, 8 * 8), Limits(7 * 7, 8 * 8))
"""Where oneDNN multiplies by tiles (AMX): its convolutions profit less from them than products."""
_FLOAT32 = _OfTaps(Limits(7 * 7, 8 * 8), Limits(4 * 4, 7 * 7))
_FLOAT32_BY_SLOW_MKL = _OfTaps(Limits(0, 4 * 4), Limits(0, 4 * 4))
"""Where MKL is slower than oneDNN."""


class MatmulConv2d(ForTraining, nn.Conv2d):
    r""":math:`Y = P W^T + b`, where the rows of P are the patches of the input."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.Conv2d`` does."""
        dtype = _served_dtype(self, input) if self.training and not is_computed(self) else None
        if dtype is None:
            return super().forward(input)
        pixels, most = _pixels(self, input), limits(dtype, self.weight.shape[2:])
        if not pixels or pixels > (most.weight if _is_learning(self.weight) else most.whole):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        assert not isinstance(self.padding, str)  # no such module is served
        x, whole = input.to(dtype), pixels <= most.whole
        return conv2d(x, self.weight, bias, self.stride, self.padding, whole=whole)


def objection_to_kind(conv: nn.Conv2d) -> str | None:
    """Why a convolution is never computed as a product, whatever its input; None if it may be."""
    if conv.groups != 1:
        return "is grouped"
    if conv.dilation != (1, 1):
        return f"has dilation={conv.dilation!r}"
    if not _is_pair(conv.stride, least=1):
        return f"has stride={conv.stride!r}"
    if conv.padding_mode != "zeros" or not _is_pair(conv.padding, least=0):
        return f"pads by {conv.padding!r} with {conv.padding_mode!r}"
    if conv.weight.numel() < LEAST_WEIGHT:
        return f"has a weight of fewer than {LEAST_WEIGHT:,} elements"
    return None


def _is_pair(value: object, least: int) -> bool:
    """Whether it is a tuple of two integers, as the constructor makes; others may be set later."""
    if not isinstance(value, tuple) or len(value) != 2:
        return False
    return all(type(each) is int and each >= least for each in value)


def limits(dtype: torch.dtype, kernel_size: Sequence[int]) -> Limits:
    """For which images of outputs products are faster on this machine.

    Args:
        dtype: in which the convolution is computed.
        kernel_size: its height and width.
    """
    of_taps = _NONE
    if dtype is torch.bfloat16 and has_bfloat16_products:
        of_taps = _BFLOAT16_BY_TILES if has_tiles() else _BFLOAT16
    elif dtype is torch.float32:
        is_mkl_slow = onednn_products.objection() is None
        of_taps = _FLOAT32_BY_SLOW_MKL if is_mkl_slow else _FLOAT32
    return of_taps.one if math.prod(kernel_size) == 1 else of_taps.several


def _served_dtype(conv: MatmulConv2d, x: Tensor) -> torch.dtype | None:
    """The dtype in which products can compute the convolution, or None if torch computes it."""
    weight, bias = conv.weight, conv.bias
    if not is_plain_call() or not are_plain(x, weight, bias):
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    is_cast = x.dtype in (torch.float32, dtype) and (bias is None or bias.dtype in (x.dtype, dtype))
    if weight.dtype is not dtype or not is_cast or objection_to_kind(conv) is not None:
        return None
    if x.dim() != 4 or (dtype is torch.float32 and _are_products_rounded()):
        return None
    layout = torch.channels_last
    if not (x.is_contiguous(memory_format=layout) and weight.is_contiguous(memory_format=layout)):
        return None
    is_possible = x.size(1) == weight.size(1) and (bias is None or bias.shape == weight.shape[:1])
    return dtype if is_possible and x.size(0) else None


def _pixels(conv: MatmulConv2d, x: Tensor) -> int:
    """Of an image of the output; 0 if the weight exceeds the padded input."""
    assert not isinstance(conv.padding, str)  # one would be an objection
    size = output_size(x, conv.weight, conv.stride, conv.padding)
    return math.prod(size) if min(size) > 0 else 0


def _is_learning(weight: Tensor) -> bool:
    return weight.requires_grad and torch.is_grad_enabled()


def _are_products_rounded() -> bool:
    """Whether the program lets oneDNN round factors of float32 products; convolutions are apart."""
    settings: Any = torch.backends.mkldnn  # its attributes for operators are set at run time
    return settings.matmul.fp32_precision not in ("none", "ieee")
