"""Convolutions that compute small images as products of matrices in training.

torch computes everything else: large images, evaluation, other devices and dtypes, subclasses of
Tensor, ``torch.func``, forward-mode differentiation, compiling, tracing, export, and calls inside a
dispatch mode or function mode of the user.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor, nn

from fusedoptim._processor import processor_facts
from fusedoptim._torch_private import has_bfloat16_products
from fusedoptim.ops._conv2d import conv2d, output_size
from transforms.rewrites import onednn_products
from transforms.rewrites.for_training import ForTraining, are_plain
from transforms.rewrites.packed import is_plain_call

LEAST_WEIGHT = 1 << 18
"""Elements of a weight from which products of matrices gain more than their calls cost."""
_LARGE_WEIGHT = 1 << 20
_PIXELS = 4 * 4
_PIXELS_OF_LARGE_WEIGHTS = 7 * 7
_PIXELS_BY_TILES = 8 * 8
"""Where oneDNN multiplies by tiles (AMX): its convolutions profit less from them than products."""


class MatmulConv2d(ForTraining, nn.Conv2d):
    r""":math:`Y = P W^T + b`, where the rows of P are the patches of the input."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Compute as ``torch.nn.Conv2d`` does."""
        dtype = _served_dtype(self, input) if self.training else None
        if dtype is None:
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        assert not isinstance(self.padding, str)  # no such module is served
        return conv2d(input.to(dtype), self.weight, bias, self.stride, self.padding)


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


def most_pixels(dtype: torch.dtype, elements: int) -> int:
    """The size of the largest image of outputs for which a product is faster on this machine.

    Args:
        dtype: in which the convolution is computed.
        elements: of the weight.
    """
    if dtype is torch.bfloat16 and has_bfloat16_products:
        return _PIXELS_BY_TILES if _has_tiles() else _PIXELS
    if dtype is torch.float32 and onednn_products.objection() is not None:
        return _PIXELS_OF_LARGE_WEIGHTS if elements >= _LARGE_WEIGHT else _PIXELS
    return 0


@functools.cache
def _has_tiles() -> bool:
    try:
        return "amx_bf16" in processor_facts().get("flags", "").split()
    except OSError:
        return False


def _served_dtype(conv: MatmulConv2d, x: Tensor) -> torch.dtype | None:
    """The dtype in which the convolution is computed as a product, or None if torch computes it."""
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
    assert not isinstance(conv.padding, str)  # one would be an objection
    size = output_size(x, weight, conv.stride, conv.padding)
    is_small = min(size) > 0 and math.prod(size) <= most_pixels(dtype, weight.numel())
    return dtype if is_possible and is_small and x.size(0) else None


def _are_products_rounded() -> bool:
    """Whether the program lets oneDNN round factors of float32 products; convolutions are apart."""
    settings: Any = torch.backends.mkldnn  # its attributes for operators are set at run time
    return settings.matmul.fp32_precision not in ("none", "ieee")
