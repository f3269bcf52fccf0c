"""Pass: draw the masks of Dropouts on all cores.

The class of each ``torch.nn.Dropout`` becomes :class:`fusedoptim.nn.Dropout`, which differs in its
random numbers only: the object, its attributes and its hooks stay.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from fusedoptim.nn import Dropout
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.tracing.modules import plain_kind
from transforms.tracing.source import names_used

_EXCHANGED = "_fusedoptim_dropout"
_BY_CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_ATTENTION = "scaled_dot_product_attention"


class ParallelDropout(Pass):
    """Exchanges every ``torch.nn.Dropout`` for ours; masks inside other functions stay torch's."""

    knob = "parallel_dropout"

    def run(self, job: Job) -> list[Entry]:
        """Exchange classes; entries are all modules that drop elements with torch's generator."""
        entries = []
        for name, module in job.model.named_modules():
            if type(module) is Dropout:
                continue
            reason = _objection(module)
            if isinstance(module, _DropoutNd) and reason is None:
                job.undo.callback(_revert, module)
                vars(module)[_EXCHANGED] = True
                module.__class__ = Dropout
                entries.append(Entry(name, "mask drawn on all cores, and again in backward"))
            elif reason is not None:
                entries.append(Entry(name, reason, done=False))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the classes of the Dropouts."""
        for module in model.modules():
            _revert(module)


def _revert(module: nn.Module) -> None:
    if vars(module).pop(_EXCHANGED, False):
        module.__class__ = nn.Dropout


def _objection(module: nn.Module) -> str | None:
    """Why masks that the module draws stay torch's, if it draws any."""
    if isinstance(module, nn.MultiheadAttention):
        return "drops attention weights inside torch's function" if module.dropout else None
    if not isinstance(module, _DropoutNd):
        is_used = _ATTENTION in names_used(type(module))
        return f"calls {_ATTENTION}, whose dropout, if any, stays torch's" if is_used else None
    if isinstance(module, _BY_CHANNEL):
        return "draws one number for each channel, which is quick"
    if type(module) is nn.Dropout and plain_kind(module, (nn.Dropout,)):
        return None
    return f"is not a plain torch.nn.Dropout: {type(module).__name__} may differ from it"
