"""Pass: Dropout modules become Identity."""

from __future__ import annotations

from contextlib import ExitStack

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from transforms._modules import has_hooks, plain_kind
from transforms._report import Entry
from transforms._stand_in import SkippedDropout, revert, stand_in

_KINDS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def drop_dropout(model: nn.Module, undo: ExitStack) -> list[Entry]:
    """Make every Dropout of ``model``, which is in eval mode, a module that does nothing.

    It keeps its attributes, such as ``p``, which other code may read.

    Args:
        model: in eval mode.
        undo: gets what undoes each change.
    """
    entries = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, _DropoutNd):
            continue
        reason = _objection(module)
        if reason is None:
            undo.callback(revert, module)
            stand_in(module, SkippedDropout)
        entries.append(Entry(name, reason or "Identity", done=reason is None))
    return entries


def _objection(module: nn.Module) -> str | None:
    if plain_kind(module, _KINDS) is None:
        return f"{type(module).__name__} has code of its own"
    if module.training:
        return "is in training mode, though the model is not"
    return "has hooks" if has_hooks(module) else None
