r"""Dropout whose random mask is a function of a seed: nothing but the seed is kept for backward.

The operator is linear in its input, so its gradient is the operator itself, with the same seed.
AlphaDropout also adds constants, which its gradient does not have.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedoptim.ops._arguments import check_tensors
from fusedoptim.ops._launching import DTYPE_NAMES, VARIANT_OF, in_order_of, launch
from fusedoptim.ops._registering import directly, register

__all__ = ["alpha_dropout", "dropout"]

_WORDS = 1 << 32  # values of a random word
_FLOOR = -1.7580993408473766
"""SELU's limit for inputs towards minus infinity, which replaces dropped elements."""


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    r"""Zero elements of ``x`` at random, and divide the others by the probability of keeping them.

    .. math::
        y_i = x_i \cdot \begin{cases} 1/(1-p) & u_i \ge p \\ 0 & \text{else} \end{cases}

    :math:`u_i` is a function of the seed and of the place of element i in memory: the same strides
    and the same seed on the same kind of device give the same mask, whatever the number of threads.

    Args:
        x: float32, float64, bfloat16 or float16, of any shape. The result has its strides, or dense
            ones in the same order.
        seed: an int64 on x's device; any value. ``torch.randint(2**63 - 1, ())`` follows
            ``torch.manual_seed``.
        p: the probability of zeroing an element; rounded to a multiple of :math:`2^{-32}`.

    Returns:
        a new tensor. Its backward pass draws the mask again.

    Raises:
        TypeError: x is not a tensor or has a dtype that no kernel computes with, the seed is not an
            int64, or p is a tensor that has dimensions or requires grad.
        ValueError: p is not between 0 and 1; the seed has several elements or another device.

    Example:
        >>> import torch
        >>> x = torch.ones(4, 4)
        >>> y = dropout(x, torch.tensor(7), 0.5)
        >>> bool(((y == 0) | (y == 2)).all()), torch.equal(y, dropout(x, torch.tensor(7), 0.5))
        (True, True)

    Semantics: ``torch.nn.functional.dropout`` of torch 2.13 in training, with another generator.
    """
    result: Tensor = _dropout(x, seed, _number("dropout", x, seed, p))
    return result


def alpha_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    r"""Replace elements of ``x`` at random by SELU's lower limit; restore mean and variance.

    .. math::
        y_i = a \cdot \begin{cases} x_i - c\,p & u_i \ge p \\ c\,(1-p) & \text{else} \end{cases},
        \qquad a = \frac{1}{\sqrt{(1 + c^2 p)(1 - p)}}, \qquad c = -1.7580993408473766

    If the elements of x have mean 0 and variance 1, so have those of y. :math:`u_i` is that of
    :func:`dropout`. For p=1 all of y is 0, as torch's is.

    Args:
        x: float32, float64, bfloat16 or float16, of any shape. The result has its strides, or dense
            ones in the same order. 16-bit values are computed in float32.
        seed: an int64 on x's device; any value. ``torch.randint(2**63 - 1, ())`` follows
            ``torch.manual_seed``.
        p: the probability of replacing an element; rounded to a multiple of :math:`2^{-32}`.

    Returns:
        a new tensor. Its backward pass draws the mask again.

    Raises:
        TypeError: x is not a tensor or has a dtype that no kernel computes with, the seed is not an
            int64, or p is a tensor that has dimensions or requires grad.
        ValueError: p is not between 0 and 1; the seed has several elements or another device.

    Example:
        >>> import torch
        >>> alpha_dropout(torch.zeros(4, 4), torch.tensor(7), 0.5).unique()
        tensor([-0.7792,  0.7792])

    Semantics: ``torch.nn.functional.alpha_dropout`` of torch 2.13 in training, with another
    generator. Source: Klambauer et al., "Self-Normalizing Neural Networks" (NeurIPS 2017).
    """
    result: Tensor = _alpha_dropout(x, seed, _number("alpha_dropout", x, seed, p), True)
    return result


def _number(name: str, x: Tensor, seed: Tensor, p: float) -> float:
    """The probability as a number; raise if an argument has a type that no operator takes."""
    if not (isinstance(x, Tensor) and isinstance(seed, Tensor)):
        check_tensors(name, x=x, seed=seed)
    if isinstance(p, Tensor):  # torch's functions accept some for a float
        if p.dim() or p.requires_grad:
            raise TypeError(
                f"{name}: p is a tensor of shape {tuple(p.shape)}"
                f"{' that requires grad' * p.requires_grad}; pass p.item(), as there is one p for "
                "all elements, and it has no gradient"
            )
        return float(p)
    return p


def _drop(x: Tensor, seed: Tensor, p: float) -> Tensor:
    y = _like(x, seed, p)
    _launch("dropout", x, y, seed, p, {"scale": 1 / (1 - p) if p < 1 else 0.0})
    return y


def _alpha_drop(x: Tensor, seed: Tensor, p: float, is_shifted: bool) -> Tensor:
    y = _alpha_like(x, seed, p, is_shifted)
    scale = 1 / math.sqrt((1 + _FLOOR**2 * p) * (1 - p)) if p < 1 else 0.0
    if is_shifted:
        shifts = {"kept": -scale * _FLOOR * p, "dropped": scale * _FLOOR * (1 - p)}
        _launch("alpha_dropout", x, y, seed, p, {"scale": scale, **shifts})
    else:
        _launch("dropout", x, y, seed, p, {"scale": scale})
    return y


def _launch(
    kernel: str, x: Tensor, y: Tensor, seed: Tensor, p: float, factors: dict[str, float]
) -> None:
    if y.numel():
        threshold = min(round(p * _WORDS), _WORDS - 1)  # p=1 zeroes all by its scale
        numbers = {"seed": seed.data_ptr(), "threshold": threshold, **factors}
        launch(kernel, {"x": in_order_of(x, y), "y": y}, numbers)


def _like(x: Tensor, seed: Tensor, p: float, name: str = "dropout") -> Tensor:
    """The output, uninitialized; raise if the operator does not accept these arguments."""
    if x.dtype not in VARIANT_OF:
        raise TypeError(
            f"{name}: x has dtype {x.dtype}, and kernels compute with {DTYPE_NAMES}; "
            f"convert it, or use torch.nn.functional.{name}"
        )
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: p={p!r} is not a probability; pass a number from 0 to 1")
    if seed.dtype != torch.int64:
        raise TypeError(f"{name}: seed has dtype {seed.dtype}; pass an int64 tensor")
    if seed.numel() != 1 or seed.device != x.device:
        raise ValueError(
            f"{name}: seed has shape {tuple(seed.shape)} and is on {seed.device}; pass "
            f"one element on x's device, {x.device}"
        )
    return torch.empty_like(x)


def _alpha_like(x: Tensor, seed: Tensor, p: float, is_shifted: bool) -> Tensor:
    return _like(x, seed, p, "alpha_dropout")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.p = inputs[2]
    ctx.strides = output.stride()


def _in_order(ctx: Any, grad: Tensor) -> Tensor:
    """The gradient with the output's strides: the mask follows the order in memory."""
    if grad.stride() == ctx.strides:
        return grad
    return grad.new_empty_strided(grad.shape, ctx.strides).copy_(grad)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (seed,) = ctx.saved_tensors
    return _dropout(_in_order(ctx, grad), seed, ctx.p), None, None


def _alpha_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (seed,) = ctx.saved_tensors
    return _alpha_dropout(_in_order(ctx, grad), seed, ctx.p, False), None, None, None


# The order in memory decides which element gets which random word: a compiler must keep it.
_TAGS = (torch.Tag.needs_exact_strides,)
_dropout = register(
    "dropout(Tensor x, Tensor seed, float p) -> Tensor",
    kernel=_drop,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
    tags=_TAGS,
    direct=directly(_drop),
)
_alpha_dropout = register(
    "alpha_dropout(Tensor x, Tensor seed, float p, bool is_shifted) -> Tensor",
    kernel=_alpha_drop,
    fake=_alpha_like,
    setup_context=_setup_context,
    backward=_alpha_backward,
    tags=_TAGS,
    direct=directly(_alpha_drop),
)
