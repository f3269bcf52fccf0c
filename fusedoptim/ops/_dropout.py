r"""Dropout whose random mask is a function of a seed: nothing but the seed is kept for backward.

The operator is linear in its input, so its gradient is the operator itself, with the same seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedoptim.ops._arguments import check_tensors
from fusedoptim.ops._launching import DTYPE_NAMES, VARIANT_OF, in_order_of, launch
from fusedoptim.ops._registering import register

__all__ = ["dropout"]

_WORDS = 1 << 32  # values of a random word


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
        TypeError: x has a dtype that no kernel computes with, the seed is not an int64, or p is a
            tensor that has dimensions or requires grad.
        ValueError: p is not between 0 and 1; the seed has several elements or another device.

    Example:
        >>> import torch
        >>> x = torch.ones(4, 4)
        >>> y = dropout(x, torch.tensor(7), 0.5)
        >>> bool(((y == 0) | (y == 2)).all()), torch.equal(y, dropout(x, torch.tensor(7), 0.5))
        (True, True)

    Semantics: ``torch.nn.functional.dropout`` of torch 2.13 in training, with another generator.
    """
    if not isinstance(seed, Tensor):
        check_tensors("dropout", seed=seed)
    if isinstance(p, Tensor):  # torch's functions accept some for a float
        if p.dim() or p.requires_grad:
            raise TypeError(
                f"dropout: p is a tensor of shape {tuple(p.shape)}"
                f"{' that requires grad' * p.requires_grad}; pass p.item(), as there is one p for "
                "all elements, and it has no gradient"
            )
        p = float(p)
    result: Tensor = _dropout(x, seed, p)
    return result


def _drop(x: Tensor, seed: Tensor, p: float) -> Tensor:
    y = _like(x, seed, p)
    if not y.numel():
        return y
    scale = 1 / (1 - p) if p < 1 else 0.0
    threshold = min(round(p * _WORDS), _WORDS - 1)  # p=1 zeroes all by its scale
    numbers = {"seed": seed.data_ptr(), "threshold": threshold, "scale": scale}
    launch("dropout", {"x": in_order_of(x, y), "y": y}, numbers)
    return y


def _direct(_: Any, x: Tensor, seed: Tensor, p: float) -> Tensor:
    return _drop(x, seed, p)  # a new tensor, not a view


def _like(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """The output, uninitialized; raise if the operator does not accept these arguments."""
    if x.dtype not in VARIANT_OF:
        raise TypeError(
            f"dropout: x has dtype {x.dtype}, and kernels compute with {DTYPE_NAMES}; convert "
            "it, or use torch.nn.functional.dropout"
        )
    if not 0 <= p <= 1:
        raise ValueError(f"dropout: p={p!r} is not a probability; pass a number from 0 to 1")
    if seed.dtype != torch.int64:
        raise TypeError(f"dropout: seed has dtype {seed.dtype}; pass an int64 tensor")
    if seed.numel() != 1 or seed.device != x.device:
        raise ValueError(
            f"dropout: seed has shape {tuple(seed.shape)} and is on {seed.device}; pass one "
            f"element on x's device, {x.device}"
        )
    return torch.empty_like(x)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    _, seed, ctx.p = inputs
    ctx.save_for_backward(seed)
    ctx.strides = output.stride()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (seed,) = ctx.saved_tensors
    if grad.stride() != ctx.strides:  # the mask follows the order in memory
        grad = grad.new_empty_strided(grad.shape, ctx.strides).copy_(grad)
    return _dropout(grad, seed, ctx.p), None, None


_dropout = register(
    "dropout(Tensor x, Tensor seed, float p) -> Tensor",
    kernel=_drop,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
    # The order in memory decides which element gets which random word: a compiler must keep it.
    tags=(torch.Tag.needs_exact_strides,),
    direct=_direct,
)
