"""Pass: replace Dropout modules with identities."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from fusedoptim.nn import AlphaDropout, Dropout
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites.stand_ins import SkippedDropout, revert, revert_all, stand_in
from transforms.tracing.modules import computes_like, has_hooks

_KINDS = (
    AlphaDropout,
    Dropout,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


class DropDropout(Pass):
    """Makes every Dropout return its input; its attributes, such as ``p``, stay."""

    knob = "replace_dropout_with_identity"
    keeps_outputs = True

    def run(self, job: Job) -> list[Entry]:
        """Replace the classes of the Dropouts."""
        entries = []
        for name, module in list(job.model.named_modules()):
            if not isinstance(module, _DropoutNd):
                continue
            reason = _objection(module) or job.asked.objection(module)
            if reason is None:
                job.undo.callback(revert, module)
                stand_in(module, SkippedDropout)
            entries.append(Entry(name, reason or "Identity", done=reason is None))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the classes of the Dropouts."""
        revert_all(model)


def _objection(module: nn.Module) -> str | None:
    if not computes_like(module, _KINDS):
        return f"{type(module).__name__} overrides its methods"
    if module.training:
        return "is in training mode, but the model is not"
    return "has hooks" if has_hooks(module) else None
