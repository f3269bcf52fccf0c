r"""Passes: a BatchNorm goes into the weights of the convolution or Linear before it.

With running mean :math:`\mu` and variance :math:`\sigma^2`, for each output channel

.. math::
    s = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} \qquad
    W' = s W \qquad b' = \beta + s (b - \mu)

computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from transforms import _plain
from transforms._modules import (
    CONVOLUTIONS,
    TRANSPOSED,
    has_computed_tensors,
    own_tensors,
    owners,
)
from transforms._pairs import Kinds, find_pairs
from transforms._report import Entry
from transforms._stand_in import FoldedBatchNorm, revert, stand_in

CONVOLUTION_KINDS: Kinds = (*CONVOLUTIONS, *TRANSPOSED)
LINEAR_KINDS: Kinds = (nn.Linear,)


def fold_batch_norm(model: nn.Module, kinds: Kinds, undo: ExitStack) -> list[Entry]:
    """Fold every BatchNorm of ``model`` that follows one of ``kinds``, and nothing else does.

    Args:
        model: in eval mode.
        kinds: CONVOLUTION_KINDS or LINEAR_KINDS.
        undo: gets what undoes each change.

    Returns:
        an entry for each BatchNorm; those that follow neither are listed with the convolutions.
    """
    names = {module: name for name, module in model.named_modules()}
    sharers = owners(model)
    pairs = find_pairs(model, (*CONVOLUTION_KINDS, *LINEAR_KINDS))
    entries = []
    for norm, feeder in pairs.feeders.items():
        if isinstance(feeder, kinds):
            fold = Fold(feeder, norm)
            reason = fold.objection(sharers)
            if reason is None:
                undo.callback(fold.detach)
                fold.attach()
                what, saved = f"folded into {names[feeder]}", fold.bytes_saved
                entries.append(Entry(names[norm], what, bytes_saved=saved))
            else:
                entries.append(Entry(names[norm], reason, done=False))
    for norm, (before, reason) in pairs.reasons.items():
        if isinstance(before, kinds) or (before is None and kinds is CONVOLUTION_KINDS):
            entries.append(Entry(names[norm], reason, done=False))
    return entries


class Fold:
    """One BatchNorm and what it is folded into: a :class:`transforms._plain.Rewrite`.

    The two stay the same modules, and the weight the same Parameter, with another tensor in it.
    """

    def __init__(self, feeder: nn.Module, norm: nn.Module) -> None:
        self._feeder: Any = feeder
        self._norm: Any = norm
        self._dtype: torch.dtype | None = None
        """of a folded weight that is float32 when plain; None is float32."""
        self._is_done = False
        self._strides: tuple[int, ...] | None = None
        self._weight: Tensor
        self._bias: Parameter | None
        self._bias_values: Tensor | None
        self._added_bias: Parameter | None = None
        """of a module that has none when plain; always the same, as an optimizer may hold it."""
        self._norm_parameters: dict[str, Parameter | None]
        self._norm_buffers: dict[str, Tensor | None]

    def objection(self, sharers: Mapping[int, list[str]]) -> str | None:
        """Why the two cannot be folded, given the modules that share each parameter."""
        feeder, norm = self._feeder, self._norm
        if norm.training or feeder.training:
            return "is in training mode, though the model is not"
        if norm.running_mean is None or norm.running_var is None:
            return "has no running statistics"
        for module in (feeder, norm):
            if has_computed_tensors(module) and not (module is norm and norm.weight is None):
                return "has a weight that is computed from others (a parametrization)"
        for _, param in feeder.named_parameters(recurse=False):
            if len(others := sharers[id(param)]) > 1:
                return f"follows a module that shares its weight: {', '.join(others)}"
        if len({t.dtype for t in self._tensors()}) > 1:
            return "differs in dtype from what it follows"
        if not feeder.weight.is_floating_point():
            return f"is {feeder.weight.dtype}"
        before = [t.isfinite().all() for t in self._tensors()]
        if not all(before) or not all(t.isfinite().all() for t in self._folded()):
            return "would be infinite or NaN when folded"
        return None

    @property
    def bytes_saved(self) -> int:
        """What the BatchNorm no longer reads."""
        kept = [*self._norm_parameters.values(), *self._norm_buffers.values()]
        return sum(t.nbytes for t in kept if t is not None and t.is_floating_point())

    def attach(self) -> None:
        """Fold, and let both save and load plain tensors."""
        self.redo()
        _plain.attach(self._feeder, self)
        _plain.attach(self._norm, self)

    def detach(self) -> None:
        """Make both what they were, for good."""
        self.undo()
        _plain.detach(self._feeder)
        _plain.detach(self._norm)

    @property
    def dtype(self) -> torch.dtype | None:
        """To which a folded float32 weight is rounded; None if it is not."""
        return self._dtype

    def round_to(self, dtype: torch.dtype | None) -> str | None:
        """Fold again, from the plain tensors, to ``dtype``; or why that cannot be."""
        before, strides = self._dtype, self._feeder.weight.stride()
        self.undo()
        self._dtype, self._strides = dtype, strides
        self.redo()
        if self._is_done:
            return None
        self._dtype = before
        self.redo()
        return f"would overflow {dtype} when folded"

    def plain(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """The tensors of a checkpoint that ``module`` has not itself."""
        if not self._is_done:
            return {}
        device = self._feeder.weight.device
        if module is self._feeder:
            tensors: dict[str, Tensor | None] = {"weight": self._weight, "bias": self._bias_values}
        else:
            tensors = {**self._norm_parameters, **self._norm_buffers}
        return {k: None if t is None else t.detach().to(device) for k, t in tensors.items()}

    def kept(self) -> Iterator[Tensor]:
        """What folding replaced."""
        for module in (self._feeder, self._norm):
            yield from (t for t in self.plain(module).values() if t is not None)

    def undo(self) -> None:
        """Make both what they were."""
        if not self._is_done:
            return
        feeder, norm = self._feeder, self._norm
        device = feeder.weight.device
        self._strides = feeder.weight.stride()
        feeder.weight.data = self._weight.to(device)
        feeder.bias = self._bias
        if self._bias is not None and self._bias_values is not None:
            self._bias.data = self._bias_values.to(device)
        revert(norm)
        for name, param in self._norm_parameters.items():
            if param is not None:
                param.data = param.data.to(device)
            norm._parameters[name] = param
        for name, buffer in self._norm_buffers.items():
            norm._buffers[name] = None if buffer is None else buffer.to(device)
        self._is_done = False

    def redo(self) -> None:
        """Fold what both hold; both stay plain if that would be infinite, or has no values."""
        feeder, norm = self._feeder, self._norm
        if self._is_done or not all(
            t.is_floating_point() and not t.is_meta for t in self._tensors()
        ):
            return
        weight, bias = self._folded()
        if not (weight.isfinite().all() and bias.isfinite().all()):
            return
        self._weight, self._bias = feeder.weight.data, feeder.bias
        self._bias_values = None if feeder.bias is None else feeder.bias.data
        self._norm_parameters = dict(norm._parameters)
        self._norm_buffers = dict(norm._buffers)
        weight = _laid_out(weight, self._strides)
        _put(feeder.weight, _plain.shared_as(weight, self._weight))
        if feeder.bias is None:
            if self._added_bias is None:
                self._added_bias = Parameter(bias, requires_grad=feeder.weight.requires_grad)
            feeder.bias = self._added_bias
        _put(feeder.bias, _plain.shared_as(bias, self._weight))
        norm._parameters.clear()
        norm._buffers.clear()
        stand_in(norm, FoldedBatchNorm, self._dimensions())
        self._is_done = True

    def _tensors(self) -> list[Tensor]:
        tensors = [*own_tensors(self._feeder), *own_tensors(self._norm)]
        return [t for name, t in tensors if name != "num_batches_tracked"]

    def _dimensions(self) -> int:
        """Of the input that has its channels where they were folded; 0 if any has."""
        if not isinstance(self._norm, nn.BatchNorm1d):
            return 0
        return 2 if isinstance(self._feeder, nn.Linear) else 3

    def _folded(self) -> tuple[Tensor, Tensor]:
        feeder, norm = self._feeder, self._norm
        groups = feeder.groups if isinstance(feeder, TRANSPOSED) else None
        weight, bias = folded(
            feeder.weight.data,
            None if feeder.bias is None else feeder.bias.data,
            norm.running_mean,
            norm.running_var,
            None if norm.weight is None else norm.weight.data,
            None if norm.bias is None else norm.bias.data,
            norm.eps,
            groups,
        )
        device, dtype = feeder.weight.device, feeder.weight.dtype
        if self._dtype is not None and dtype == torch.float32:
            dtype = self._dtype
        return weight.to(device, dtype), bias.to(device, dtype)


def folded(
    weight: Tensor,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    eps: float,
    transposed_groups: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Weight and bias that do what a module and the BatchNorm after it do, in float64 on the CPU.

    Args:
        weight: (out, in, ...); of a transposed convolution (in, out / groups, ...).
        bias: (out,) or None.
        mean: running mean, (out,).
        var: running variance, (out,).
        gamma: the BatchNorm's weight, (out,) or None.
        beta: the BatchNorm's bias, (out,) or None.
        eps: added to the variance.
        transposed_groups: the groups of a transposed convolution.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> folded(torch.tensor([[3.0]]), None, one, one, 4 * one, None, 3.0)
        (tensor([[6.]], dtype=torch.float64), tensor([-2.], dtype=torch.float64))
    """
    mean, var = _double(mean), _double(var)
    scale = (var + eps).rsqrt() if gamma is None else _double(gamma) / (var + eps).sqrt()
    shift = -mean if bias is None else _double(bias) - mean
    offset = scale * shift if beta is None else _double(beta) + scale * shift
    exact = _double(weight)
    if transposed_groups is None:
        return exact * scale.reshape(-1, *[1] * (exact.dim() - 1)), offset
    by_group = exact.reshape(transposed_groups, -1, *exact.shape[1:])
    factors = scale.reshape(transposed_groups, 1, -1, *[1] * (exact.dim() - 2))
    return (by_group * factors).flatten(0, 1), offset


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float64)  # not every GPU has float64


def _put(param: Parameter, values: Tensor) -> None:
    """Exchange the tensor in a Parameter; gradients are for other values."""
    if values.dtype != param.dtype:
        param.grad = None
    param.data = values


def _laid_out(values: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    if strides is None or strides == values.stride():
        return values
    return torch.empty_strided(
        values.shape, strides, dtype=values.dtype, device=values.device
    ).copy_(values)


def fold_of(module: nn.Module) -> Fold | None:
    """The fold that wrote the weight of ``module``."""
    rewrite = _plain.find(module)
    return rewrite if isinstance(rewrite, Fold) else None
