"""Passes: fold a BatchNorm into the convolution or Linear before it.

:mod:`transforms.tracing.batch_norm_pairs` finds the pairs, and :mod:`transforms.rewrites.fold`
folds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites.fold import Fold
from transforms.tracing.asked import Asked
from transforms.tracing.batch_norm_pairs import find_batch_norm_pairs
from transforms.tracing.modules import CONVOLUTIONS, TRANSPOSED, Kinds, frozen_batch_norms, owners

_CONVOLUTIONS: Kinds = (*CONVOLUTIONS, *TRANSPOSED)
_LINEARS: Kinds = (nn.Linear,)


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
        pairs = find_batch_norm_pairs(job.model, (*_CONVOLUTIONS, *_LINEARS))
        entries = []
        for norm, feeder in pairs.feeders.items():
            if not isinstance(feeder, self._kinds):
                continue
            fold = Fold(feeder, norm)
            reason = _objection(feeder, norm, sharers)
            if reason is None and len({t.dtype for t in fold.tensors()}) > 1:
                reason = "differs in dtype from the module before it"
            reason = reason or fold.objection() or _question(feeder, norm, job.asked, names)
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


class FoldIntoConvolutions(_FoldBatchNorm):
    """Folds each BatchNorm into the convolution or transposed convolution before it."""

    knob = "conv_bn_folding"
    _kinds = _CONVOLUTIONS
    _has_the_rest = True


class FoldIntoLinears(_FoldBatchNorm):
    """Folds each BatchNorm into the Linear before it."""

    knob = "linear_bn_folding"
    _kinds = _LINEARS


def _objection(feeder: Any, norm: Any, sharers: Mapping[int, list[str]]) -> str | None:
    """Why the two must not be folded; ``sharers`` has the modules that share each parameter."""
    if norm.training or feeder.training:
        return "is in training mode, but the model is not"
    if norm.running_mean is None or norm.running_var is None:
        return "has no running statistics"
    if (other := _other_dimension(feeder, norm)) is not None:
        return other
    for _, param in feeder.named_parameters(recurse=False):
        if len(others := sharers[id(param)]) > 1:
            return f"follows a module that shares its weight: {', '.join(others)}"
    return None


def _question(
    feeder: nn.Module, norm: nn.Module, asked: Asked, names: Mapping[nn.Module, str]
) -> str | None:
    """Why the two must keep their classes and tensors, if they must."""
    if (reason := asked.objection(norm)) is not None:
        return reason
    reason = asked.objection(feeder)
    return None if reason is None else f"follows {names[feeder]}: {reason}"


def _other_dimension(feeder: Any, norm: Any) -> str | None:
    """Why ``norm`` does not normalize the output channels of ``feeder``, if that is certain.

    A BatchNorm's channels are in dimension 1, and its class determines the number of dimensions.
    The channels of a convolution without a batch are in dimension 0, those of a Linear in the last.
    """
    kinds: Kinds = (nn.Conv1d, nn.ConvTranspose1d, nn.Linear)
    if isinstance(norm, (nn.BatchNorm2d, *frozen_batch_norms())):
        kinds = (nn.Conv2d, nn.ConvTranspose2d)
    elif isinstance(norm, nn.BatchNorm3d):
        kinds = (nn.Conv3d, nn.ConvTranspose3d)
    made = feeder.out_features if isinstance(feeder, nn.Linear) else feeder.out_channels
    if not isinstance(feeder, kinds):
        return f"normalizes a dimension other than the channels of the {type(feeder).__name__}"
    if (normalized := norm.running_mean.numel()) != made:
        return (
            f"normalizes {normalized} channels, but the module before it has {made}: "
            "they are in another dimension"
        )
    return None
