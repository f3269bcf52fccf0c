"""What gradients are multiplied by inside the kernels: sign, loss scale and clipping at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of one element that nobody writes to."""
    return torch.tensor(value, dtype=dtype, device=device)


def grad_factor(
    sign: float, common: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """What gradients are multiplied by.

    Args:
        sign: -1 if the step is to ascend.
        common: what all the optimizer's are; None is 1.
        dtype: of the arithmetic.
        device: where the gradients are.

    Returns:
        a tensor of one element there, which is the same one where ``common`` is None.
    """
    if common is None:
        return constant(sign, dtype, device)
    return (sign * common).to(device, dtype)


def multiplier(
    grad_scale: Tensor | None, squares: Sequence[Tensor], max_norm: float | None, eps: float
) -> Tensor:
    r"""What unscales the gradients and clips their norm.

    .. math::
        c = \frac{1}{s} \min\left(1, \frac{n_{max}}{\lVert g \rVert / s + \epsilon}\right)

    Args:
        grad_scale: :math:`s`, by which the loss was multiplied; None is 1.
        squares: 0-d tensors whose sum is :math:`\lVert g \rVert^2`.
        max_norm: :math:`n_{max}`; None does not clip.
        eps: :math:`\epsilon`; torch's is :math:`10^{-6}`.

    Returns:
        a 0-d tensor, computed where the first of its ingredients is, without waiting for it.

    Semantics: ``torch.amp.GradScaler.unscale_`` and ``torch.nn.utils.clip_grad_norm_``.
    """
    ingredients = [*squares, *([] if grad_scale is None else [grad_scale])]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in ingredients), torch.float32)
    device = ingredients[0].device if ingredients else torch.device("cpu")
    result = torch.ones((), dtype=dtype, device=device)
    if grad_scale is not None:
        result = result / grad_scale.to(device, dtype).reshape(())
    if max_norm is not None:
        total = torch.zeros((), dtype=dtype, device=device)
        for square in squares:
            total = total + square.to(device, dtype)
        norm = total.sqrt() * result
        result = result * (max_norm / (norm + eps)).clamp(max=1.0)
    return result
