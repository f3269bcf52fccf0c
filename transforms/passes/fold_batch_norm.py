"""Passes: fold a BatchNorm into the convolution or Linear before it.

The arithmetic is in :mod:`transforms.rewrites.folding`, the search for pairs in
:mod:`transforms.tracing.pairs`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import plain_tensors
from transforms.rewrites.folding import PlainPair, folded, unfolded
from transforms.rewrites.stand_ins import FoldedBatchNorm, revert, stand_in
from transforms.tracing.modules import (
    CONVOLUTIONS,
    TRANSPOSED,
    has_computed_tensors,
    own_tensors,
    owners,
)
from transforms.tracing.pairs import Kinds, find_pairs

CONVOLUTION_KINDS: Kinds = (*CONVOLUTIONS, *TRANSPOSED)
LINEAR_KINDS: Kinds = (nn.Linear,)


class _FoldBatchNorm(Pass):
    keeps_outputs = True
    _kinds: ClassVar[Kinds]
    """The modules into which the pass folds."""
    _has_the_rest: ClassVar[bool] = False
    """Whether the report's entries include the BatchNorms that follow neither kind of module."""

    def run(self, job: Job) -> list[Entry]:
        """Fold each BatchNorm that is the only user of such a module's output."""
        names = {module: name for name, module in job.model.named_modules()}
        sharers = owners(job.model)
        pairs = find_pairs(job.model, (*CONVOLUTION_KINDS, *LINEAR_KINDS))
        entries = []
        for norm, feeder in pairs.feeders.items():
            if isinstance(feeder, self._kinds):
                fold = Fold(feeder, norm)
                reason = fold.objection(sharers)
                if reason is None:
                    job.undo.callback(fold.detach)
                    fold.attach()
                    what, saved = f"folded into {names[feeder]}", fold.bytes_saved
                    entries.append(Entry(names[norm], what, bytes_saved=saved))
                else:
                    entries.append(Entry(names[norm], reason, done=False))
        for norm, (before, reason) in pairs.reasons.items():
            if isinstance(before, self._kinds) or (before is None and self._has_the_rest):
                entries.append(Entry(names[norm], reason, done=False))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Unfold, keeping what the folded weights have learnt."""
        plain_tensors.undo_all(model)


class FoldIntoConvolutions(_FoldBatchNorm):
    """Folds each BatchNorm into the convolution or transposed convolution before it."""

    knob = "conv_bn_folding"
    _kinds = CONVOLUTION_KINDS
    _has_the_rest = True


class FoldIntoLinears(_FoldBatchNorm):
    """Folds each BatchNorm into the Linear before it."""

    knob = "linear_bn_folding"
    _kinds = LINEAR_KINDS


class Fold:
    """A :class:`~transforms.rewrites.plain_tensors.Rewrite`: a BatchNorm folded into a module.

    The modules and the weight's Parameter stay the same objects; the Parameter gets another tensor.
    """

    def __init__(self, feeder: nn.Module, norm: nn.Module) -> None:
        self._feeder: Any = feeder
        self._norm: Any = norm
        self._dtype: torch.dtype | None = None
        """The dtype of a folded weight that is float32 when plain; None for float32."""
        self._is_done = False
        self._strides: tuple[int, ...] | None = None
        self._bias: Parameter | None
        self._feeder_tensors: dict[str, Any]
        """The plain weight and bias."""
        self._norm_parameters: dict[str, Parameter | None]
        self._norm_buffers: dict[str, Tensor | None]
        self._digest: bytes
        """The digest of the folded weight and bias, to notice what they learn."""
        self._added_bias: Parameter | None = None
        """The folded bias of a module without one: one object, as an optimizer may hold it."""

    def objection(self, sharers: Mapping[int, list[str]]) -> str | None:
        """Why the two cannot be folded; ``sharers`` lists the modules that share each parameter."""
        feeder, norm = self._feeder, self._norm
        if norm.training or feeder.training:
            return "is in training mode, but the model is not"
        if norm.running_mean is None or norm.running_var is None:
            return "has no running statistics"
        if (other := _other_dimension(feeder, norm)) is not None:
            return other
        for module in (feeder, norm):
            if has_computed_tensors(module) and not (module is norm and norm.weight is None):
                return "has a weight that is computed from others (a parametrization)"
        for _, param in feeder.named_parameters(recurse=False):
            if len(others := sharers[id(param)]) > 1:
                return f"follows a module that shares its weight: {', '.join(others)}"
        if len({t.dtype for t in self._tensors()}) > 1:
            return "differs in dtype from the module before it"
        if not feeder.weight.is_floating_point():
            return f"is {feeder.weight.dtype}"
        before = [t.isfinite().all() for t in self._tensors()]
        if not all(before) or not all(t.isfinite().all() for t in self._folded()):
            return "would become infinite or NaN if folded"
        return None

    @property
    def bytes_saved(self) -> int:
        """The bytes of the BatchNorm that a forward pass no longer reads."""
        kept = [*self._norm_parameters.values(), *self._norm_buffers.values()]
        return sum(t.nbytes for t in kept if t is not None and t.is_floating_point())

    def attach(self) -> None:
        """Fold, and let both save and load plain tensors."""
        self.redo()
        plain_tensors.attach(self._feeder, self)
        plain_tensors.attach(self._norm, self)

    def detach(self) -> None:
        """Make both modules plain for good."""
        self.undo()
        plain_tensors.detach(self._feeder)
        plain_tensors.detach(self._norm)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype to which a folded float32 weight is rounded; None if it is not rounded."""
        return self._dtype

    def round_to(self, dtype: torch.dtype | None) -> str | None:
        """Fold to another dtype, from the plain tensors; return why not, if that fails."""
        before, strides = self._dtype, self._feeder.weight.stride()
        self.undo()
        self._dtype, self._strides = dtype, strides
        self.redo()
        if self._is_done:
            return None
        self._dtype = before
        self.redo()
        return f"would overflow {dtype} if folded"

    def plain(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """The plain tensors that a checkpoint of ``module`` holds."""
        if not self._is_done:
            return {}
        unsaved = module._non_persistent_buffers_set
        tensors = {k: t for k, t in self._plain_tensors(module).items() if k not in unsaved}
        return {k: None if t is None else t.detach() for k, t in tensors.items()}

    def check(self) -> None:
        """Raise if the folded weight or bias was replaced by something that cannot be unfolded."""
        if not self._is_done:
            return
        kept = self._plain_pair()
        for name, shape in (("weight", kept.weight.shape), ("bias", kept.mean.shape)):
            param = self._feeder._parameters.get(name)
            if param is None:
                raise plain_tensors.changed(
                    self._feeder, f"lost its {name}, to pruning or a parametrization,"
                )
            if param.shape != shape:
                raise plain_tensors.changed(self._feeder, f"got a {name} of another shape")

    def kept(self) -> Iterator[Tensor]:
        """The tensors that folding replaced."""
        if self._is_done:
            for module in (self._feeder, self._norm):
                yield from (t for t in self._kept_tensors(module).values() if t is not None)

    def undo(self) -> None:
        """Make both modules plain, keeping what they have learnt since."""
        if not self._is_done:
            return
        feeder, norm = self._feeder, self._norm
        feeders, norms = self._plain_tensors(feeder), self._plain_tensors(norm)
        self._strides = feeder.weight.stride()
        _put(feeder.weight, feeders["weight"])
        feeder.bias = self._bias
        if self._bias is not None:
            _put(self._bias, feeders["bias"])
        revert(norm)
        for name, param in self._norm_parameters.items():
            if param is not None:
                param.data = norms[name]
            norm._parameters[name] = param
        for name in self._norm_buffers:
            norm._buffers[name] = norms[name]
        self._is_done = False

    def redo(self) -> None:
        """Fold; both stay plain if a folded value would be infinite, or if there are no values."""
        feeder, norm = self._feeder, self._norm
        if self._is_done or has_computed_tensors(feeder) or has_computed_tensors(norm):
            return
        if not all(t.is_floating_point() and not t.is_meta for t in self._tensors()):
            return
        weight, bias = self._folded()
        if not (weight.isfinite().all() and bias.isfinite().all()):
            return
        self._bias = feeder.bias
        self._feeder_tensors = {
            "weight": feeder.weight.data,
            "bias": None if feeder.bias is None else feeder.bias.data,
        }
        self._norm_parameters = dict(norm._parameters)
        self._norm_buffers = dict(norm._buffers)
        strided = _laid_out(weight, self._strides)
        _put(feeder.weight, plain_tensors.shared_as(strided, self._feeder_tensors["weight"]))
        if feeder.bias is None:
            if self._added_bias is None:
                self._added_bias = Parameter(bias, requires_grad=feeder.weight.requires_grad)
            feeder.bias = self._added_bias
        _put(feeder.bias, plain_tensors.shared_as(bias, self._feeder_tensors["weight"]))
        self._digest = _digest(feeder.weight, feeder.bias)
        norm._parameters.clear()
        norm._buffers.clear()
        stand_in(norm, FoldedBatchNorm, self._dimensions())
        self._is_done = True

    def _tensors(self) -> list[Tensor]:
        tensors = [*own_tensors(self._feeder), *own_tensors(self._norm)]
        return [t for name, t in tensors if name != "num_batches_tracked"]

    def _dimensions(self) -> int:
        """How many dimensions an input must have for the fold to be right; 0 for any number."""
        if not isinstance(self._norm, nn.BatchNorm1d):
            return 0
        return 2 if isinstance(self._feeder, nn.Linear) else 3

    def _kept_tensors(self, module: nn.Module) -> dict[str, Any]:
        """The tensors that one of the two held when it was folded."""
        if module is self._feeder:
            return dict(self._feeder_tensors)
        return {**self._norm_parameters, **self._norm_buffers}

    def _plain_pair(self) -> PlainPair:
        """The current tensors of both if they are plain, or those from when they were folded."""
        feeder, norm = self._feeder, self._norm
        if self._is_done:
            own, norms = self._kept_tensors(feeder), self._kept_tensors(norm)
        else:
            own, norms = feeder._parameters, {**norm._parameters, **norm._buffers}
        return PlainPair(
            *(own["weight"], own["bias"], norms["running_mean"], norms["running_var"]),
            *(norms["weight"], norms["bias"], norm.eps),
            feeder.groups if isinstance(feeder, TRANSPOSED) else None,
        )

    def _folded(self) -> tuple[Tensor, Tensor]:
        weight, bias = folded(self._plain_pair())
        device, dtype = self._feeder.weight.device, self._feeder.weight.dtype
        if self._dtype is not None and dtype == torch.float32:
            dtype = self._dtype
        return weight.to(device, dtype), bias.to(device, dtype)

    def _plain_tensors(self, module: nn.Module) -> dict[str, Any]:
        """The tensors that one of the two would hold if it were plain."""
        self._learn()
        tensors, device = self._kept_tensors(module), self._feeder.weight.device
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = (tensor.data if isinstance(tensor, Parameter) else tensor).to(
                    device
                )
        return tensors

    def _learn(self) -> None:
        """Update the plain tensors with what was written to the folded weight and bias."""
        weight, bias = self._feeder.weight, self._feeder.bias
        if (digest := _digest(weight, bias)) == self._digest:
            return
        learnt = unfolded(weight, bias, self._plain_pair())
        self._feeder_tensors = {"weight": learnt.weight, "bias": learnt.bias}
        self._norm_buffers = {**self._norm_buffers, "running_mean": learnt.mean}
        for name, values in (("weight", learnt.gamma), ("bias", learnt.beta)):
            if (param := self._norm_parameters[name]) is not None and values is not None:
                param.data = values.detach()
        self._digest = digest


def _other_dimension(feeder: Any, norm: Any) -> str | None:
    """Why ``norm`` does not normalize the output channels of ``feeder``, if that is certain.

    A BatchNorm's channels are in dimension 1, and its class determines the number of dimensions.
    The channels of a convolution without a batch are in dimension 0, those of a Linear in the last.
    """
    kinds: Kinds = (nn.Conv1d, nn.ConvTranspose1d, nn.Linear)
    if isinstance(norm, nn.BatchNorm2d):
        kinds = (nn.Conv2d, nn.ConvTranspose2d)
    elif isinstance(norm, nn.BatchNorm3d):
        kinds = (nn.Conv3d, nn.ConvTranspose3d)
    made = feeder.out_features if isinstance(feeder, nn.Linear) else feeder.out_channels
    if not isinstance(feeder, kinds):
        return f"normalizes another dimension than the channels of the {type(feeder).__name__}"
    if norm.num_features != made:
        return (
            f"normalizes {norm.num_features} channels, but the module before it has {made}: "
            "they are in another dimension"
        )
    return None


def _digest(*tensors: Tensor) -> bytes:
    """A digest of the bits for any strides; version counters miss writes through ``.data``."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.digest()


def _put(param: Parameter, values: Tensor) -> None:
    """Replace the tensor in a Parameter, and drop a gradient of another dtype."""
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
    """The fold that computed the weight of ``module``, if any."""
    rewrite = plain_tensors.find(module)
    return rewrite if isinstance(rewrite, Fold) else None
