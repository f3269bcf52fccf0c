"""The numbers of a step: hyper-parameters, and what gradients are multiplied by.

Sign, loss scale and clipping form one factor, which the kernels read from the device's memory.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedoptim.step.rule import Numbers
from fusedoptim.step.sharding import is_piece

CLIP_EPS = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm that it divides by."""


class TakesScale:
    """Whether GradScaler leaves it to the step to unscale, and to skip a step with infinities.

    Not if other processes have parts of the parameters, since FullyShardedDataParallel's scaler
    tells them of infinities only when it unscales itself.
    """

    def __get__(self, optimizer: Any, owner: object = None) -> bool:
        if optimizer is None:
            return True
        return not any(is_piece(p) for group in optimizer.param_groups for p in group["params"])

    def __set__(self, optimizer: object, value: bool) -> None:
        """Ignore what torch's classes set with ``fused=True``."""


def number(value: Any) -> float:
    """A hyper-parameter, which may be a tensor or a NumPy number, as a Python number."""
    result: float = value.item() if hasattr(value, "item") else value
    return result


class Settings(NamedTuple):
    """The numbers of one group while its hyper-parameters stay the same."""

    numbers: Numbers
    """The kernels' scalars and flags."""
    sign: float
    """The sign of the gradients: -1 to ascend."""


@functools.cache
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)


def grad_factor(
    sign: float, common: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The factor of a group's gradients: ``sign`` times ``common``, the factor of all gradients.

    If ``common`` is None, the result is the same tensor every time; nobody writes to it.
    """
    if common is None:
        return _constant(sign, dtype, device)
    return (sign * common).to(device, dtype)


def common_factor(
    grad_scale: Tensor | None, squares: Sequence[Tensor], max_norm: float | None, eps: float
) -> Tensor:
    r"""The factor that unscales the gradients and clips their norm.

    .. math::
        c = \frac{1}{s} \min\left(1, \frac{n_{max}}{\lVert g \rVert / s + \epsilon}\right)

    Args:
        grad_scale: :math:`s`, by which the loss was multiplied; None is 1.
        squares: 0-d tensors whose sum is :math:`\lVert g \rVert^2`.
        max_norm: :math:`n_{max}`; None does not clip.
        eps: :math:`\epsilon`; torch's is :data:`CLIP_EPS`.

    Returns:
        a 0-d tensor on the device of the first of these tensors, computed without waiting for it.

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
