"""Pass: keep the weights of convolutions, Linears and LSTMs in oneDNN's layout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import exchanged_class, fast_path, geometry, packed, packed_lstm
from transforms.rewrites.for_training import ForTraining
from transforms.rewrites.int8 import Int8Module
from transforms.rewrites.packed import PackedModule
from transforms.rewrites.packed_copy import Pack
from transforms.rewrites.packed_lstm import PackedLSTM
from transforms.rewrites.schemas import difference
from transforms.rewrites.watched_parameter import WATCHABLE, unwatch_all
from transforms.tracing.modules import (
    COMPUTED,
    NO_PARAMETER,
    WEIGHT_AND_BIAS,
    Kinds,
    has_computed_tensors,
    has_own_parameters,
    is_plain,
)

_CLASSES: dict[type[nn.Module], type[PackedModule]] = {**packed.CLASSES, nn.LSTM: PackedLSTM}
_LEAST_TERMS, _LEAST_TAPS = 15, 11
"""The terms for each output, and in float32 the taps, from which packing a Conv1d saves more than
copying its result costs (docs/design/packed-weights.md)."""
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose3d)
_KINDS: Kinds = (*_CLASSES, *_TRANSPOSED, nn.GRU, nn.RNN)


class PackWeights(Pass):
    """Replaces the classes of convolutions, Linears and LSTMs by packed ones.

    A weight is packed when its module is first called, so a module that is never called costs
    nothing.
    """

    knob = "weights_prepack"
    keeps_outputs = True
    must_pay = True

    def run(self, job: Job) -> list[Entry]:
        """Replace classes; entries are the convolutions, Linears and recurrent networks."""
        entries = []
        uncalled = fast_path.uncalled(job.model)
        for name, module in job.model.named_modules():
            if isinstance(module, PackedModule) or not isinstance(module, _KINDS):
                continue
            if isinstance(module, ForTraining):  # the model was trained
                exchanged_class.suspend(module, job.undo)
            reason = fast_path.OBJECTION if module in uncalled else _objection(module)
            reason = reason or job.asked.objection(module)
            if reason is None:
                job.undo.callback(unwatch_all, module)
                ours = _CLASSES[type(module)]
                exchanged_class.exchange(module, ours, job.undo, _fusedoptim_pack=Pack())
            what = "weight packed at the first call that is large enough"
            entries.append(Entry(name, reason or what, done=reason is None))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the classes of the modules, and drop the packed copies."""
        for module in model.modules():
            if isinstance(module, PackedModule):
                unwatch_all(module)
                exchanged_class.revert(module)


def _weights(module: nn.Module) -> list[str]:
    """The names of the weights that are packed."""
    if not isinstance(module, nn.RNNBase):
        return ["weight"]
    return packed_lstm.weight_names(module)


def _objection(module: nn.Module) -> str | None:
    names = _weights(module)
    if any(has_computed_tensors(module, name) for name in names):
        return COMPUTED
    if isinstance(module, Int8Module):
        return "computes in INT8"
    if isinstance(module, nn.GRU | nn.RNN):
        return f"torch's operators of oneDNN have no {type(module).__name__}"
    if isinstance(module, _TRANSPOSED):
        return "oneDNN returns other strides than torch: a copy costs most of what packing gains"
    if not is_plain(module, tuple(_CLASSES)):
        return f"overrides its methods: {type(module).__name__} may differ"
    if not has_own_parameters(module, names if isinstance(module, nn.LSTM) else WEIGHT_AND_BIAS):
        return NO_PARAMETER
    absent = (packed_lstm if isinstance(module, nn.LSTM) else packed).missing_operators()
    if absent:
        return difference(absent)
    for weight in (module._parameters[name] for name in names):
        if weight is None or type(weight) not in WATCHABLE:
            return f"has a weight of class {type(weight).__name__}"
        if weight.device.type != "cpu":
            return f"is on {weight.device.type}: oneDNN's packed weights are for the CPU"
    if isinstance(module, nn.Conv1d) and _is_short(module.weight):
        return "is too short: copying oneDNN's result costs what packing gains"
    if getattr(module, "proj_size", 0):
        return "has projections (proj_size), which oneDNN's operator lacks"
    return geometry.objection(module)


def _is_short(weight: Tensor) -> bool:
    """Whether a Conv1d's kernel is too short to be packed."""
    has_few_terms = weight.numel() < _LEAST_TERMS * weight.size(0)
    return has_few_terms or (weight.dtype == torch.float32 and weight.size(2) < _LEAST_TAPS)
