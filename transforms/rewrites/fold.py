"""A BatchNorm folded into the convolution or Linear before it; fold_arithmetic has the formulas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fusedoptim.split.pages import has_sole_owner, release_pages
from transforms.rewrites import plain_tensors, remainders
from transforms.rewrites.finite import is_finite
from transforms.rewrites.fold_arithmetic import PlainPair, factors, folded, unfolded
from transforms.rewrites.stand_ins import FoldedBatchNorm, revert, stand_in
from transforms.rewrites.watched_parameter import detached
from transforms.tracing.modules import COMPUTED, TRANSPOSED, has_computed_tensors, own_tensors


class _Plain(NamedTuple):
    """What makes both modules plain, all computed before anything is replaced."""

    feeder: dict[str, Any]
    """The values of the weight and the bias."""
    norm: dict[str, Any]
    """The values of the parameters and buffers."""
    requires_grad: dict[str, bool]
    """New settings of the BatchNorm's parameters."""


class Fold:
    """A :class:`~transforms.rewrites.plain_tensors.Rewrite`: a BatchNorm folded into a module.

    The modules and the weight's Parameter stay the same objects; the Parameter gets another tensor.
    """

    def __init__(self, feeder: nn.Module, norm: nn.Module) -> None:
        self._feeder: Any = feeder
        self._norm: Any = norm
        self.dtype: torch.dtype | None = None
        """The dtype of a folded weight that is float32 when plain; None for float32."""
        self._is_done = False
        self._why_undone: str | None = None
        self._strides: tuple[int, ...] | None = None
        self._bias: Parameter | None
        self._feeder_tensors: dict[str, Any]
        """The plain weight, or None if the remainder replaces it, and the plain bias."""
        self._remainder: remainders.Remainder | None = None
        """The plain weight is computed from this, unless someone else held that weight."""
        self._norm_parameters: dict[str, Parameter | None]
        self._norm_buffers: dict[str, Tensor | None]
        self._digest: bytes
        """The digest of the folded weight and bias, to notice when they were trained."""
        self._requires_grad: dict[str, bool]
        """The ``requires_grad`` of the folded weight and bias when they were folded."""
        self._coming: _Plain | None = None
        """What both modules become while they are neither plain nor folded."""
        self._learnt: tuple[PlainPair, bytes] | None = None
        """Trained values and the digest of what they fold to, while they replace kept tensors."""
        self._added_bias: Parameter | None = None
        """The folded bias of a module without one: always one object; an optimizer may hold it."""

    def tensors(self) -> list[Tensor]:
        """The tensors of the two plain modules that are folded."""
        both = [*own_tensors(self._feeder), *own_tensors(self._norm)]
        return [t for name, t in both if name != "num_batches_tracked"]

    def objection(self) -> str | None:
        """Why the values of the two plain modules cannot be folded, if they cannot."""
        found = self._folded_or_objection()
        return found if isinstance(found, str) else None

    def _folded_or_objection(self) -> tuple[Tensor, Tensor] | str:
        """The folded weight and bias, or why the values cannot be folded."""
        if has_computed_tensors(self._feeder) or has_computed_tensors(self._norm):
            return COMPUTED
        tensors = self.tensors()
        for t in tensors:
            if not t.is_floating_point() or t.is_meta:
                return f"is {t.dtype}" if not t.is_meta else "has no values (device meta)"
        folded_tensors = self._folded()
        if not all(map(is_finite, (*tensors, *folded_tensors))):
            return "would become infinite or NaN if folded"
        return folded_tensors

    @property
    def bytes_saved(self) -> int:
        """The bytes of the BatchNorm that a forward pass no longer reads."""
        kept = [*self._norm_parameters.values(), *self._norm_buffers.values()]
        return sum(t.nbytes for t in kept if t is not None and t.is_floating_point())

    def attach(self) -> None:
        """Fold, and make both modules save and load plain tensors."""
        self.redo()
        plain_tensors.attach(self._feeder, self)
        plain_tensors.attach(self._norm, self)

    def detach(self) -> None:
        """Make both modules plain for good."""
        self.undo()
        plain_tensors.detach(self._feeder)
        plain_tensors.detach(self._norm)

    def round_to(self, dtype: torch.dtype | None) -> str | None:
        """Fold to another dtype, from the plain tensors; return why not, if that fails."""
        before, strides = self.dtype, self._feeder.weight.stride()
        self.undo()
        self.dtype, self._strides = dtype, strides
        self.redo()
        if self._is_done:
            return None
        self.dtype = before
        self.redo()
        return f"would overflow {dtype} if folded"

    def plain(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """The plain tensors that a checkpoint of ``module`` holds."""
        if not self._is_done:
            return {}
        unsaved = module._non_persistent_buffers_set
        tensors = {k: t for k, t in self._plain_tensors(module).items() if k not in unsaved}
        return {k: None if t is None else t.detach() for k, t in tensors.items()}

    def reason_undone(self, module: nn.Module) -> str | None:
        """Why the BatchNorm is not folded at present, if it is not."""
        return self._why_undone if module is self._norm and not self._is_done else None

    def check(self) -> None:
        """Raise if the folded weight or bias was replaced by something that cannot be unfolded."""
        if self._coming is not None:  # an interrupt came
            self._become_plain()
        if not self._is_done:
            return
        kept, mean = self._feeder_tensors["weight"], self._norm_buffers["running_mean"]
        plain = kept.shape if self._remainder is None else self._remainder.shape
        assert mean is not None
        for name, shape in (("weight", plain), ("bias", mean.shape)):
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
            yield from () if self._remainder is None else self._remainder.tensors

    def undo(self) -> None:
        """Make both modules plain, keeping what they have learned since."""
        if self._coming is None:
            if not self._is_done:
                return
            feeder = self._feeder
            tensors = self._plain_tensors(feeder), self._plain_tensors(self._norm)
            now = {name: feeder._parameters[name].requires_grad for name in self._requires_grad}
            before = self._requires_grad
            changed = {name: now[name] for name in now if now[name] != before[name]}
            self._strides = feeder.weight.stride()
            self._coming = _Plain(*tensors, changed)
        try:
            self._become_plain()
        except BaseException:  # an interrupt
            self._become_plain()
            raise

    def _become_plain(self) -> None:
        """Make both modules what ``_coming`` says; after an interrupt, this can be repeated."""
        coming, feeder, norm = self._coming, self._feeder, self._norm
        if coming is None:  # the interrupt came last
            return
        for name, is_trained in coming.requires_grad.items():  # set since for the whole model
            if (param := self._norm_parameters.get(name)) is not None:
                param.requires_grad_(is_trained)
        _put(feeder.weight, coming.feeder["weight"])
        feeder._parameters["bias"] = self._bias
        if self._bias is not None:
            _put(self._bias, coming.feeder["bias"])
        revert(norm)
        for name, param in self._norm_parameters.items():
            if param is not None:
                param.data = coming.norm[name]
            norm._parameters[name] = param
        for name in self._norm_buffers:
            norm._buffers[name] = coming.norm[name]
        self._is_done = False
        self._coming = None

    def redo(self) -> None:
        """Fold; both stay plain if a folded value would be infinite, or if there are no values."""
        feeder, norm = self._feeder, self._norm
        if self._coming is not None:  # an interrupt came
            self._become_plain()
        if self._is_done:
            return
        found = self._folded_or_objection()
        self._why_undone = found if isinstance(found, str) else None
        if isinstance(found, str):
            return
        weight, bias = found
        self._bias = feeder.bias
        self._remainder = self._divided(weight)
        plain = feeder.weight.data
        self._feeder_tensors = {
            "weight": plain if self._remainder is None else None,
            "bias": None if feeder.bias is None else feeder.bias.data,
        }
        self._norm_parameters = dict(norm._parameters)
        self._norm_buffers = dict(norm._buffers)
        if self._strides is not None:
            weight = plain_tensors.with_strides(weight, self._strides)
        weight, bias = (plain_tensors.shared_as(each, plain) for each in (weight, bias))
        if self._bias is None and self._added_bias is None:
            self._added_bias = Parameter(bias, requires_grad=feeder.weight.requires_grad)
        before = {"weight": plain, "bias": self._feeder_tensors["bias"]}
        norms = {**self._norm_parameters, **self._norm_buffers}
        norms = {k: t.data if isinstance(t, Parameter) else t for k, t in norms.items()}
        self._coming = _Plain(before, norms, {})
        try:
            self._become_folded(weight, bias)
        except BaseException:  # an interrupt
            self._become_plain()
            raise
        if self._remainder is not None:
            release_pages(plain)  # malloc may keep the block

    def _become_folded(self, weight: Tensor, bias: Tensor) -> None:
        feeder, norm = self._feeder, self._norm
        _put(feeder.weight, weight)
        if feeder.bias is None:
            feeder._parameters["bias"] = self._added_bias
        _put(feeder.bias, bias)
        self._digest = _digest(feeder.weight, feeder.bias)
        folds = {"weight": feeder.weight, "bias": feeder.bias}
        self._requires_grad = {name: p.requires_grad for name, p in folds.items()}
        norm._parameters.clear()
        norm._buffers.clear()
        # A batch of the feeder's outputs has as many dimensions as the weight. With others, a
        # BatchNorm1d would normalize other channels, and the other classes raise.
        stand_in(norm, FoldedBatchNorm, feeder.weight.dim())
        self._is_done = True
        self._coming = None

    def _divided(self, weight: Tensor) -> remainders.Remainder | None:
        """The remainder to compute the plain weight from; None if the weight must be kept."""
        plain = self._feeder.weight
        if not plain.dtype == weight.dtype == torch.float32 or not has_sole_owner(plain):
            return None
        return remainders.split(detached(plain), weight, factors(self._plain_pair()))

    def _kept_tensors(self, module: nn.Module) -> dict[str, Any]:
        """The tensors that one of the two modules held when it was folded."""
        if module is self._feeder:
            return dict(self._feeder_tensors)
        return {**self._norm_parameters, **self._norm_buffers}

    def _plain_pair(self) -> PlainPair:
        """The current tensors of both modules if they are plain, else those that were folded."""
        feeder, norm = self._feeder, self._norm
        if self._is_done:
            own, norms = self._kept_tensors(feeder), self._kept_tensors(norm)
            own["weight"] = self._plain_weight()
        else:
            own, norms = feeder._parameters, {**norm._parameters, **norm._buffers}
        return PlainPair(
            *(own["weight"], own["bias"], norms["running_mean"], norms["running_var"]),
            *(norms["weight"], norms["bias"], norm.eps),
            feeder.groups if isinstance(feeder, TRANSPOSED) else None,
        )

    def _plain_weight(self) -> Tensor:
        """The plain weight that was folded."""
        if self._remainder is not None:
            return remainders.join(self._feeder.weight, self._remainder)
        weight: Tensor = self._feeder_tensors["weight"]
        return weight

    def _folded(self) -> tuple[Tensor, Tensor]:
        device, dtype = self._feeder.weight.device, self._feeder.weight.dtype
        if self.dtype is not None and dtype == torch.float32:
            dtype = self.dtype
        weight, bias = folded(self._plain_pair(), dtype)
        return weight.to(device), bias.to(device)

    def _plain_tensors(self, module: nn.Module) -> dict[str, Any]:
        """The tensors that one of the two modules would hold if it were plain."""
        self._learn()
        tensors, device = self._kept_tensors(module), self._feeder.weight.device
        if module is self._feeder:
            tensors["weight"] = self._plain_weight()
        for name, t in tensors.items():
            if t is not None:
                tensors[name] = (t.data if isinstance(t, Parameter) else t).to(device)
        return tensors

    def _learn(self) -> None:
        """Update the plain tensors with values written to the folded weight and bias."""
        self._keep_learnt()  # an interrupt may have come
        weight, bias = self._feeder.weight, self._feeder.bias
        if (digest := _digest(weight, bias)) == self._digest:
            return
        self._learnt = unfolded(weight, bias, self._plain_pair()), digest
        self._keep_learnt()

    def _keep_learnt(self) -> None:
        """Replace the kept tensors by trained ones, if any; this can be repeated."""
        if self._learnt is None:
            return
        trained, digest = self._learnt
        self._feeder_tensors = {"weight": trained.weight, "bias": trained.bias}
        self._remainder = None
        self._norm_buffers = {**self._norm_buffers, "running_mean": trained.mean}
        for name, values in (("weight", trained.gamma), ("bias", trained.beta)):
            if name in self._norm_buffers:  # in a frozen BatchNorm
                self._norm_buffers[name] = values
            elif (param := self._norm_parameters[name]) is not None and values is not None:
                param.data = values.detach()
        self._digest = digest
        self._learnt = None


def _digest(*tensors: Tensor) -> bytes:
    """A digest of the bits, for any strides; version counters miss writes through ``.data``."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        values = detached(tensor).cpu().contiguous().flatten().view(torch.uint8)
        digest.update(values.numpy().data)
    return digest.digest()


def _put(param: Parameter, values: Tensor) -> None:
    """Replace the tensor in a Parameter, and drop a gradient of another dtype."""
    if values.dtype != param.dtype:
        param.grad = None
    param.data = values


def fold_of(module: nn.Module) -> Fold | None:
    """The fold that computed the weight of ``module``, if any."""
    rewrite = plain_tensors.find(module)
    return rewrite if isinstance(rewrite, Fold) else None
