"""Pass: draw the masks of dropout on all cores.

The class of each ``torch.nn.Dropout``, ``AlphaDropout`` and ``MultiheadAttention`` becomes its
namesake of :mod:`fusedoptim.nn`: the object, its attributes and its hooks stay. Models of
transformers with "sdpa" attention get ours through that library's registry.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from fusedoptim.nn import AlphaDropout, Dropout, MultiheadAttention
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import exchanged_class, registered_attention
from transforms.tracing.modules import is_plain
from transforms.tracing.source import functions_called, names_used

_BY_CHANNEL = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)
_BY_ELEMENT = "mask drawn on all cores, and again in backward"
_ATTENTION = "scaled_dot_product_attention"
_FUNCTIONS = {
    nn.functional.dropout: "torch.nn.functional.dropout",
    nn.functional.alpha_dropout: "torch.nn.functional.alpha_dropout",
    torch.dropout: "torch.dropout",
    torch.alpha_dropout: "torch.alpha_dropout",
}
"""Functions whose masks stay torch's."""
_OURS: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.Dropout: (Dropout, _BY_ELEMENT),
    nn.AlphaDropout: (AlphaDropout, _BY_ELEMENT),
    nn.MultiheadAttention: (MultiheadAttention, "mask of the weights drawn on all cores"),
}
"""Our class for one of torch's, and what that changes."""


class ParallelDropout(Pass):
    """Replaces Dropouts and attention by ours; masks inside other functions stay torch's."""

    knob = "parallel_dropout"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes; entries are all modules that drop elements with torch's generator."""
        entries = self._exchange_registered(job)
        for name, module in job.model.named_modules():
            reason, is_ours = _objection(module), type(module) in _OURS
            if reason is None and is_ours and getattr(module, "dropout", True):
                ours, what = _OURS[type(module)]
                reason = job.asked.objection(module)
                if reason is None:
                    exchanged_class.exchange(module, ours, job.undo)
                    entries.append(Entry(name, what))
            if reason is not None:
                entries.append(Entry(name, reason, done=False))
        return entries

    def _exchange_registered(self, job: Job) -> list[Entry]:
        """Replace the attention of transformers' models."""
        entries = []
        for name, modules in registered_attention.pretrained(job.model):
            if registered_attention.is_exchanged(modules):
                continue
            reason = registered_attention.objection(modules)
            if reason is None:
                job.undo.callback(registered_attention.revert, modules[0])
                registered_attention.exchange(modules)
            what = "masks of its attention drawn on all cores"
            entries.append(Entry(name, reason or what, done=reason is None))
        return entries

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Restore the classes of the modules, and the attention of transformers' models."""
        exchanged_class.revert_all(model)
        registered_attention.revert(model)


def _objection(module: nn.Module) -> str | None:
    """Why masks that the module draws stay torch's, if it draws any."""
    if isinstance(module, tuple(ours for ours, _ in _OURS.values())):
        return None
    if isinstance(module, nn.MultiheadAttention):
        return _objection_to_attention(module) if module.dropout else None
    if not isinstance(module, _DropoutNd):
        return _objection_to_code(type(module))
    if isinstance(module, _BY_CHANNEL):
        return "draws one number for each channel, which is quick"
    torchs = nn.AlphaDropout if isinstance(module, nn.AlphaDropout) else nn.Dropout
    if is_plain(module, (torchs,)):
        return None
    return f"is not a plain torch.nn.{torchs.__name__}: {type(module).__name__} may differ from it"


def _objection_to_code(cls: type[nn.Module]) -> str | None:
    """Why masks of functions that the class calls stay torch's, if it calls any."""
    called = [function for function, _ in functions_called(cls)]
    names = [name for known, name in _FUNCTIONS.items() if any(f is known for f in called)]
    if _ATTENTION in names_used(cls):
        names.insert(0, _ATTENTION)
    return f"calls {' and '.join(names)}, whose dropout, if any, stays torch's" if names else None


def _objection_to_attention(module: nn.MultiheadAttention) -> str | None:
    if not is_plain(module, (nn.MultiheadAttention,)):
        name = type(module).__name__
        return f"is not a plain torch.nn.MultiheadAttention: {name} may differ from it"
    if module.bias_k is not None or module.add_zero_attn:
        return "drops attention weights inside torch's function (add_bias_kv or add_zero_attn)"
    if any(p.device.type != "cpu" for p in module.parameters()):
        return "is not on the CPU, the one device where torch draws masks on one thread"
    return None
