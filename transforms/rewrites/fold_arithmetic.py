r"""The arithmetic of folding a BatchNorm into the weight and bias before it, and its inverse.

With running mean :math:`\mu` and variance :math:`\sigma^2`, for each output channel

.. math::
    s = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} \qquad
    W' = s W \qquad b' = \beta + s (b - \mu)

computed in float64 and rounded once. The inverse, for a folded weight and bias that were trained:

.. math::
    W = W' / s \qquad \beta = b' - s (b - \mu)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transforms.rewrites import plain_tensors
from transforms.rewrites.remainders import row_pieces
from transforms.rewrites.watched_parameter import detached


class PlainPair(NamedTuple):
    """The tensors to fold, of a module with ``out`` channels and the BatchNorm after it."""

    weight: Tensor
    """(out, in, ...); of a transposed convolution (in, out / groups, ...)."""
    bias: Tensor | None
    """(out,)"""
    mean: Tensor
    """running mean, (out,)."""
    var: Tensor
    """running variance, (out,)."""
    gamma: Tensor | None
    """the BatchNorm's weight, (out,)."""
    beta: Tensor | None
    """the BatchNorm's bias, (out,)."""
    eps: float
    """added to the variance."""
    transposed_groups: int | None = None
    """of a transposed convolution."""


def folded(plain: PlainPair, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The folded weight and bias of a module and its BatchNorm, on the CPU.

    They are computed in float64, piece by piece, and rounded to ``dtype``.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> folded(PlainPair(torch.tensor([[3.0]]), None, one, one, 4 * one, None, 3.0))
        (tensor([[6.]], dtype=torch.float64), tensor([-2.], dtype=torch.float64))
    """
    scale, mean = _scale(plain), _double(plain.mean)
    shift = -mean if plain.bias is None else _double(plain.bias) - mean
    offset = scale * shift if plain.beta is None else _double(plain.beta) + scale * shift
    weight = torch.empty_like(plain.weight, dtype=dtype, device="cpu", requires_grad=False)
    factor = _by_channel(scale, plain).expand(weight.shape)
    for rows in row_pieces(weight):
        weight[rows] = _double(plain.weight[rows]) * factor[rows]
    return weight, offset.to(dtype)


def factors(plain: PlainPair) -> Tensor:
    """The float64 factors of a plain weight, which broadcast to it."""
    return _by_channel(_scale(plain), plain)


def unfolded(weight: Tensor, bias: Tensor, plain: PlainPair) -> PlainPair:
    """The plain tensors that fold to ``weight`` and ``bias``.

    Values that did not change keep all bits. A changed bias goes to the BatchNorm's bias. If the
    BatchNorm has none, it goes to the other module's bias, and if that has none either, to the
    running mean. Channels whose scale is 0, or so small that the quotient overflows, get the
    scale 1.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> plain = PlainPair(torch.tensor([[3.0]]), None, one, one, 4 * one, one, 3.0)
        >>> trained = unfolded(torch.tensor([[8.0]]), torch.tensor([-1.0]), plain)
        >>> trained.weight, trained.beta
        (tensor([[4.]]), tensor([1.]))
    """
    new = detached(weight).cpu(), detached(bias).cpu()
    old = folded(plain)
    is_new = new[0] != old[0].to(weight.dtype), new[1] != old[1].to(bias.dtype)
    trained = _quotient(*new, *is_new, plain)
    channels = _channels(~trained.weight.cpu().isfinite(), plain)
    for values in (trained.bias, trained.mean, trained.beta):
        if values is not None:
            channels |= ~values.cpu().isfinite()
    if plain.gamma is None or not channels.any():
        return trained
    unit = (_double(plain.var) + plain.eps).sqrt()
    plain = plain._replace(gamma=_changed(plain.gamma, channels, unit))
    everywhere = _by_channel(channels, plain).expand(weight.shape)
    return _quotient(*new, is_new[0] | everywhere, is_new[1] | channels, plain)


def _quotient(
    weight: Tensor, bias: Tensor, is_new_weight: Tensor, is_new_bias: Tensor, plain: PlainPair
) -> PlainPair:
    """``plain``, changed so that it folds to ``weight`` and ``bias`` where these are new."""
    scale, mean, bias = _scale(plain), _double(plain.mean), _double(bias)
    quotient = _double(weight) / _by_channel(scale, plain)
    plain = plain._replace(weight=_changed(plain.weight, is_new_weight, quotient))
    if plain.beta is not None:
        shift = -mean if plain.bias is None else _double(plain.bias) - mean
        return plain._replace(beta=_changed(plain.beta, is_new_bias, bias - scale * shift))
    if plain.bias is not None:
        return plain._replace(bias=_changed(plain.bias, is_new_bias, bias / scale + mean))
    return plain._replace(mean=_changed(plain.mean, is_new_bias, -bias / scale))


def _changed(values: Tensor, where: Tensor, exact: Tensor) -> Tensor:
    """A copy of ``values`` with the same strides, and with the values of ``exact`` at ``where``."""
    mixed = torch.where(where, exact.to(values.dtype), detached(values).cpu())
    return plain_tensors.shared_as(torch.empty_like(values).copy_(mixed), values)


def _scale(plain: PlainPair) -> Tensor:
    """The factor of each channel."""
    variance = _double(plain.var) + plain.eps
    return variance.rsqrt() if plain.gamma is None else _double(plain.gamma) / variance.sqrt()


def _by_channel(values: Tensor, plain: PlainPair) -> Tensor:
    """Reshape one value for each channel so that it broadcasts to the weight."""
    shape = plain.weight.shape
    if plain.transposed_groups is None:
        return values.reshape(-1, *[1] * (len(shape) - 1))
    by_group = values.reshape(plain.transposed_groups, 1, -1)
    inputs = shape[0] // plain.transposed_groups
    return by_group.expand(-1, inputs, -1).reshape(*shape[:2], *[1] * (len(shape) - 2))


def _channels(is_so: Tensor, plain: PlainPair) -> Tensor:
    """The channels with at least one true element; ``is_so`` has the weight's shape."""
    if plain.transposed_groups is None:
        return is_so.flatten(1).any(1)
    elements = is_so.reshape(plain.transposed_groups, -1, is_so.shape[1], is_so[0, 0].numel())
    return elements.any(3).any(1).flatten()


def _double(tensor: Tensor) -> Tensor:
    return detached(tensor).to("cpu", torch.float64)  # not every GPU has float64
