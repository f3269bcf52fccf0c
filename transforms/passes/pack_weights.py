"""Pass: keep the weights of convolutions and Linears in oneDNN's layout."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import exchanged_class
from transforms.rewrites.int8 import Int8Module
from transforms.rewrites.packed import CLASSES, Pack, PackedModule, missing_operators
from transforms.rewrites.watched_parameter import WatchedParameter, unwatch
from transforms.tracing.modules import has_computed_tensors, plain_kind

_KINDS: tuple[type[nn.Module], ...] = tuple(CLASSES)


class PackWeights(Pass):
    """Exchanges the classes of convolutions and Linears for packed ones.

    A weight is packed when the module is first called, so one that nothing calls costs nothing.
    """

    knob = "weights_prepack"
    keeps_outputs = True
    must_pay = True

    def run(self, job: Job) -> list[Entry]:
        """Exchange classes; entries are the convolutions and Linears on the CPU."""
        absent = missing_operators()
        entries = []
        for name, module in job.model.named_modules():
            if isinstance(module, PackedModule) or not isinstance(module, _KINDS):
                continue
            reason = _objection(module)
            if absent:
                reason = f"this torch has another {', '.join(absent)} than torch 2.13"
            if reason is None:
                job.undo.callback(_unwatch, module)
                ours = CLASSES[type(module)]
                exchanged_class.exchange(module, ours, job.undo, _fusedoptim_pack=Pack())
            what = "weight packed at the first call"
            entries.append(Entry(name, reason or what, done=reason is None))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the classes of the modules, and drop the packed copies."""
        for module in model.modules():
            if isinstance(module, PackedModule):
                _unwatch(module)
                exchanged_class.revert(module)


def _unwatch(module: nn.Module) -> None:
    unwatch(module._parameters.get("weight"))


def _objection(module: nn.Module) -> str | None:
    if has_computed_tensors(module):
        return "has a weight that is computed from others (a parametrization)"
    if isinstance(module, Int8Module):
        return "computes in INT8"
    if type(module) not in CLASSES or plain_kind(module, (type(module),)) is None:
        return f"overrides its methods: {type(module).__name__} may differ"
    weight = module._parameters["weight"]
    if weight is None or type(weight) not in (nn.Parameter, WatchedParameter):
        return f"has a weight of class {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"is on {weight.device.type}: oneDNN's packed weights are for the CPU"
    if isinstance(getattr(module, "padding", None), str):
        return f"has padding={module.padding!r}"
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return f"has padding_mode={module.padding_mode!r}"
    return None
