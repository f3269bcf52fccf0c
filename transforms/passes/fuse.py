"""Pass: let convolutions and Linears with packed weights apply the activation after them."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import exchanged_class
from transforms.rewrites.fused_activation import FusedActivation, make_fused, objection
from transforms.rewrites.packed import PackedProduct
from transforms.rewrites.post_ops import ACTIVATION, activations, post_op
from transforms.tracing.activations import find_activations


class Fuse(Pass):
    """Tells packed modules which activation is the only user of their output."""

    knob = "fuse"
    keeps_outputs = True
    must_pay = True

    def run(self, job: Job) -> list[Entry]:
        """Replace the classes of activations; entries are those that were not replaced before.

        Products before an activation that is a function have an entry too.
        """
        kinds = activations(job.model)
        names = {module: name for name, module in job.model.named_modules()}
        known = (m for m in names if post_op(m) is not None and not isinstance(m, FusedActivation))
        reasons = {a: objection(a, job.asked) for a in known}
        if not any(isinstance(m, PackedProduct) for m in names):
            why = "no module has packed weights (weights_prepack)"
            return [Entry(names[m], reason or why, done=False) for m, reason in reasons.items()]
        found = find_activations(job.model, (PackedProduct,), kinds)
        fed: dict[nn.Module, list[str]] = {}
        for feeder, activation in found.after.items():
            if reasons[activation] is None:
                job.undo.callback(vars(feeder).pop, ACTIVATION, None)
                make_fused(activation, job.undo)
                vars(feeder)[ACTIVATION] = activation  # in vars(), as it is not a child
                fed.setdefault(activation, []).append(names[feeder])
        entries = []
        for activation, reason in reasons.items():
            what = f"applied by {', '.join(fed.get(activation, []))}"
            reason = reason or found.reasons.get(activation)
            entries.append(Entry(names[activation], reason or what, done=reason is None))
        for feeder, functions in found.functions.items():
            what = f"is followed by {functions}, a function: only graph mode fuses functions"
            entries.append(Entry(names[feeder], what, done=False))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the classes of the activations."""
        for module in model.modules():
            vars(module).pop(ACTIVATION, None)
            if isinstance(module, FusedActivation):
                exchanged_class.revert(module)
