"""Activations as oneDNN's operators and torch's in-place functions compute them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transforms.rewrites import exchanged_class

ACTIVATION = "_fusedoptim_activation"
"""The key in ``vars`` of a layer (it is not a child) for the activation, the only user of its
output."""
_LIBRARY = "transformers.activations"
_gelu_in_place: Any = torch.ops.aten.gelu_.default


class PostOp(NamedTuple):
    """How an activation is computed: by the product before it, and in place."""

    attribute: str | None
    """oneDNN's name; None if that turns NaN into a number, as oneDNN's maximum and minimum do."""
    scalars: list[float]
    algorithm: str
    in_place: Callable[[Tensor], Tensor]
    of_numbers: str | None = None
    """oneDNN's name that is valid if no value is NaN, where :attr:`attribute` is None."""


def clamp(least: float, most: float) -> PostOp:
    """Hardtanh."""
    in_place = functools.partial(nn.functional.hardtanh_, min_val=least, max_val=most)
    return PostOp(None, [least, most], "", in_place, "hardtanh")


def leaky_relu(slope: float) -> PostOp:
    """LeakyReLU."""
    # With the slope 0 it is a maximum.
    attribute = "leaky_relu" if slope != 0 else None
    return PostOp(attribute, [slope], "", lambda x: nn.functional.leaky_relu_(x, slope))


@functools.cache
def gelu(approximate: str) -> PostOp:
    """GELU by erf ("none") or by "tanh"."""
    return PostOp("gelu", [], approximate, lambda x: _gelu_in_place(x, approximate=approximate))


NO_OP = PostOp("none", [], "", lambda x: x)
"""No activation."""
RELU = PostOp(None, [], "", torch.relu_, "relu")
"""ReLU."""
_SILU = PostOp("swish", [], "", lambda x: nn.functional.silu(x, inplace=True))
_HARDSWISH = PostOp("hardswish", [], "", lambda x: nn.functional.hardswish(x, inplace=True))
_HARDSIGMOID = PostOp(None, [], "", lambda x: nn.functional.hardsigmoid(x, inplace=True))
_SIGMOID = PostOp("sigmoid", [], "", torch.sigmoid_)
_TANH = PostOp("tanh", [], "", torch.tanh_)

OF_FUNCTIONS: Mapping[str, PostOp] = {
    "silu": _SILU,
    "hardswish": _HARDSWISH,
    "sigmoid": _SIGMOID,
    "tanh": _TANH,
}
"""The activations that oneDNN applies, by the names of torch's functions without options."""
_OF_TORCH: Mapping[type[nn.Module], Callable[[Any], PostOp]] = {
    nn.ReLU: lambda module: RELU,
    nn.ReLU6: lambda module: clamp(0.0, 6.0),
    nn.Hardtanh: lambda module: clamp(module.min_val, module.max_val),
    nn.LeakyReLU: lambda module: leaky_relu(module.negative_slope),
    nn.GELU: lambda module: gelu(module.approximate),
    nn.SiLU: lambda module: _SILU,
    nn.Hardswish: lambda module: _HARDSWISH,
    nn.Hardsigmoid: lambda module: _HARDSIGMOID,
    nn.Sigmoid: lambda module: _SIGMOID,
    nn.Tanh: lambda module: _TANH,
}
_OF_TRANSFORMERS: Mapping[str, Callable[[Any], PostOp]] = {
    "GELUActivation": lambda module: gelu("none"),
    "NewGELUActivation": lambda module: gelu("tanh"),
    "FastGELUActivation": lambda module: gelu("tanh"),
    "GELUTanh": lambda module: gelu("tanh"),
    "SiLUActivation": lambda module: _SILU,
}
"""The classes that compute the same, in a call of torch's or in single operations."""


def post_op(activation: nn.Module) -> PostOp | None:
    """How the activation is computed; None if it is not known."""
    own = exchanged_class.own_class(activation)
    make = _OF_TORCH.get(own)
    if make is None and own.__module__ == _LIBRARY:
        make = _OF_TRANSFORMERS.get(own.__name__)
    return None if make is None else make(activation)


def activations(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of the activations in ``model`` that :func:`post_op` knows."""
    modules = (module for module in model.modules() if post_op(module) is not None)
    return tuple({exchanged_class.own_class(module): None for module in modules})
