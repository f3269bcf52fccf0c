r"""Passes: a BatchNorm goes into the weights of the convolution or Linear before it.

With running mean :math:`\mu` and variance :math:`\sigma^2`, for each output channel

.. math::
    s = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} \qquad
    W' = s W \qquad b' = \beta + s (b - \mu)

computed in float64 and rounded once. What the folded weight and bias learn is unfolded again:

.. math::
    W = W' / s \qquad \beta = b' - s (b - \mu)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import plain_tensors
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
    """The modules into which it folds."""
    _has_the_rest: ClassVar[bool] = False
    """Whether its entries include the BatchNorms that follow no module of any such kind."""

    def run(self, job: Job) -> list[Entry]:
        """Fold each BatchNorm that alone gets the output of one such module."""
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
        """Unfold, with what the folded weights have learnt."""
        plain_tensors.undo_all(model)


class FoldIntoConvolutions(_FoldBatchNorm):
    """Folds each BatchNorm into the convolution before it, also a transposed one."""

    knob = "conv_bn_folding"
    _kinds = CONVOLUTION_KINDS
    _has_the_rest = True


class FoldIntoLinears(_FoldBatchNorm):
    """Folds each BatchNorm into the Linear before it."""

    knob = "linear_bn_folding"
    _kinds = LINEAR_KINDS


class Fold:
    """A :class:`~transforms.rewrites.plain_tensors.Rewrite`: a BatchNorm in the module before it.

    The two stay the same modules, and the weight the same Parameter, with another tensor in it.
    """

    def __init__(self, feeder: nn.Module, norm: nn.Module) -> None:
        self._feeder: Any = feeder
        self._norm: Any = norm
        self._dtype: torch.dtype | None = None
        """of a folded weight that is float32 when plain; None is float32."""
        self._is_done = False
        self._strides: tuple[int, ...] | None = None
        self._bias: Parameter | None
        self._feeder_tensors: dict[str, Any]
        """weight and bias when plain."""
        self._norm_parameters: dict[str, Parameter | None]
        self._norm_buffers: dict[str, Tensor | None]
        self._digest: bytes
        """of what they were folded to."""
        self._added_bias: Parameter | None = None
        """of a module that has none when plain; always the same, as an optimizer may hold it."""

    def objection(self, sharers: Mapping[int, list[str]]) -> str | None:
        """Why the two cannot be folded, given the modules that share each parameter."""
        feeder, norm = self._feeder, self._norm
        if norm.training or feeder.training:
            return "is in training mode, though the model is not"
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
        plain_tensors.attach(self._feeder, self)
        plain_tensors.attach(self._norm, self)

    def detach(self) -> None:
        """Make both what they were, for good."""
        self.undo()
        plain_tensors.detach(self._feeder)
        plain_tensors.detach(self._norm)

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
        unsaved = module._non_persistent_buffers_set
        tensors = {k: t for k, t in self._plain_tensors(module).items() if k not in unsaved}
        return {k: None if t is None else t.detach() for k, t in tensors.items()}

    def check(self) -> None:
        """Raise if the folded weight or bias was replaced by what cannot be unfolded."""
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
        """What folding replaced."""
        if self._is_done:
            for module in (self._feeder, self._norm):
                yield from (t for t in self._kept_tensors(module).values() if t is not None)

    def undo(self) -> None:
        """Make both what they were, with what they learnt since."""
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
        """Fold what both hold; both stay plain if that would be infinite, or has no values."""
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
        """Of the input that has its channels where they were folded; 0 if any has."""
        if not isinstance(self._norm, nn.BatchNorm1d):
            return 0
        return 2 if isinstance(self._feeder, nn.Linear) else 3

    def _kept_tensors(self, module: nn.Module) -> dict[str, Any]:
        """What one of the two held when it was folded."""
        if module is self._feeder:
            return dict(self._feeder_tensors)
        return {**self._norm_parameters, **self._norm_buffers}

    def _plain_pair(self) -> PlainPair:
        """What both hold if they are plain, or held when they were folded."""
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
        """What one of the two would hold if it were plain."""
        self._learn()
        tensors, device = self._kept_tensors(module), self._feeder.weight.device
        for name, tensor in tensors.items():
            if tensor is not None:
                tensors[name] = (tensor.data if isinstance(tensor, Parameter) else tensor).to(
                    device
                )
        return tensors

    def _learn(self) -> None:
        """Unfold what was written to the folded weight and bias."""
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
    """Why ``norm`` does not normalize the channels that ``feeder`` makes, if that is certain.

    A BatchNorm takes its channels from dimension 1 of as many dimensions as its class says. A
    convolution without a batch puts them in dimension 0, a Linear in the last one.
    """
    kinds: Kinds = (nn.Conv1d, nn.ConvTranspose1d, nn.Linear)
    if isinstance(norm, nn.BatchNorm2d):
        kinds = (nn.Conv2d, nn.ConvTranspose2d)
    elif isinstance(norm, nn.BatchNorm3d):
        kinds = (nn.Conv3d, nn.ConvTranspose3d)
    made = feeder.out_features if isinstance(feeder, nn.Linear) else feeder.out_channels
    if not isinstance(feeder, kinds):
        return f"normalizes another dimension than the channels of a {type(feeder).__name__}"
    if norm.num_features != made:
        return (
            f"normalizes {norm.num_features} channels, and what it follows makes {made}: they lie "
            "in another dimension"
        )
    return None


class PlainPair(NamedTuple):
    """What is folded. A module and the BatchNorm after it have ``out`` channels."""

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


def folded(plain: PlainPair) -> tuple[Tensor, Tensor]:
    """Weight and bias that do what a module and the BatchNorm after it do, in float64 on the CPU.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> folded(PlainPair(torch.tensor([[3.0]]), None, one, one, 4 * one, None, 3.0))
        (tensor([[6.]], dtype=torch.float64), tensor([-2.], dtype=torch.float64))
    """
    scale, mean = _scale(plain), _double(plain.mean)
    shift = -mean if plain.bias is None else _double(plain.bias) - mean
    offset = scale * shift if plain.beta is None else _double(plain.beta) + scale * shift
    return _double(plain.weight) * _by_channel(scale, plain), offset


def unfolded(weight: Tensor, bias: Tensor, plain: PlainPair) -> PlainPair:
    """What folds to ``weight`` and ``bias``: ``plain``, with every bit that does not concern them.

    The bias becomes the BatchNorm's. If that has none, the other module's; if neither has, it goes
    into the running mean. Channels whose scale is 0, or so small that the quotient overflows, get
    the scale 1.

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> plain = PlainPair(torch.tensor([[3.0]]), None, one, one, 4 * one, one, 3.0)
        >>> learnt = unfolded(torch.tensor([[8.0]]), torch.tensor([-1.0]), plain)
        >>> learnt.weight, learnt.beta
        (tensor([[4.]]), tensor([1.]))
    """
    new = weight.detach().cpu(), bias.detach().cpu()
    was = folded(plain)
    is_new = new[0] != was[0].to(weight.dtype), new[1] != was[1].to(bias.dtype)
    learnt = _quotient(*new, *is_new, plain)
    channels = _channels(~learnt.weight.cpu().isfinite(), plain)
    for values in (learnt.bias, learnt.mean, learnt.beta):
        if values is not None:
            channels |= ~values.cpu().isfinite()
    if plain.gamma is None or not channels.any():
        return learnt
    unit = (_double(plain.var) + plain.eps).sqrt()
    plain = plain._replace(gamma=_changed(plain.gamma, channels, unit))
    everywhere = _by_channel(channels, plain).expand(weight.shape)
    return _quotient(*new, is_new[0] | everywhere, is_new[1] | channels, plain)


def _quotient(
    weight: Tensor, bias: Tensor, is_new_weight: Tensor, is_new_bias: Tensor, plain: PlainPair
) -> PlainPair:
    """``plain`` that folds to ``weight`` and ``bias`` where these are new."""
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
    """A copy of ``values``, laid out alike, with others in some places."""
    mixed = torch.where(where, exact.to(values.dtype), values.detach().cpu())
    return plain_tensors.shared_as(torch.empty_like(values).copy_(mixed), values)


def _scale(plain: PlainPair) -> Tensor:
    """By which each channel is multiplied."""
    variance = _double(plain.var) + plain.eps
    return variance.rsqrt() if plain.gamma is None else _double(plain.gamma) / variance.sqrt()


def _by_channel(values: Tensor, plain: PlainPair) -> Tensor:
    """One of ``values`` for each channel, in a shape that broadcasts to the weight's."""
    shape = plain.weight.shape
    if plain.transposed_groups is None:
        return values.reshape(-1, *[1] * (len(shape) - 1))
    by_group = values.reshape(plain.transposed_groups, 1, -1)
    inputs = shape[0] // plain.transposed_groups
    return by_group.expand(-1, inputs, -1).reshape(*shape[:2], *[1] * (len(shape) - 2))


def _channels(is_so: Tensor, plain: PlainPair) -> Tensor:
    """Which channels have an element of the weight of which it is so."""
    if plain.transposed_groups is None:
        return is_so.flatten(1).any(1)
    elements = is_so.reshape(plain.transposed_groups, -1, is_so.shape[1], is_so[0, 0].numel())
    return elements.any(3).any(1).flatten()


def _digest(*tensors: Tensor) -> bytes:
    """Of the bits, in whatever layout. Version counters miss writes by ``.data`` and by address."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.digest()


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
    rewrite = plain_tensors.find(module)
    return rewrite if isinstance(rewrite, Fold) else None
