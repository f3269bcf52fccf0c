"""Which modules of a model may compute in INT8, and why others may not."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from transforms.rewrites import fast_path, geometry
from transforms.rewrites.finite import is_finite
from transforms.rewrites.int8 import CLASSES, DTYPES, Int8Module
from transforms.rewrites.watched_parameter import WATCHABLE
from transforms.tracing.asked import Asked
from transforms.tracing.modules import TRANSPOSED, Kinds, objection_to_exchange

_KINDS: Kinds = tuple(CLASSES)


def objections(
    model: nn.Module, keep: Sequence[str], is_dynamic: bool, asked: Asked
) -> dict[str, str | None]:
    """For each convolution and Linear, by name: why it stays in floating point, or None.

    Args:
        model: a model in eval mode.
        keep: names, or patterns of names, of modules left unchanged, with everything inside them.
        is_dynamic: whether each call finds the range of its input.
        asked: the modules that must keep their classes.

    Raises:
        ValueError: no module has one of the names in ``keep``.
    """
    kept = _kept(model, keep)
    uncalled = fast_path.uncalled(model)
    found: dict[str, str | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, TRANSPOSED):
            found[name] = "is a transposed convolution: torch has no INT8 operator for it"
        elif isinstance(module, _KINDS) and not isinstance(module, Int8Module):
            why = kept.get(module) or _objection(module) or asked.objection(module)
            if why is None and module in uncalled:
                why = fast_path.OBJECTION
            if why is None and is_dynamic and not isinstance(module, nn.Linear):
                why = "is a convolution: it needs the range of its input, so pass a loader"
            found[name] = why
    return found


def _kept(model: nn.Module, keep: Sequence[str]) -> Mapping[nn.Module, str]:
    """The modules that ``keep`` names and those inside them, with the reason."""
    modules = {name: m for name, m in model.named_modules(remove_duplicate=False) if name}
    names = list(modules)  # a module that is used twice has several
    reasons: dict[nn.Module, str] = {}
    for pattern in keep:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            raise ValueError(
                f"keep: {pattern!r} is not the name of a module; this {type(model).__name__} has "
                f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            )
        for match in matches:
            for module in modules[match].modules():
                reasons.setdefault(module, f"keep={pattern!r}")
    return reasons


def _objection(module: Any) -> str | None:
    elsewhere = "is on {device}: oneDNN's INT8 is for the CPU"
    if (reason := objection_to_exchange(module, _KINDS, WATCHABLE, elsewhere)) is not None:
        return reason
    weight = module.weight
    if weight.dtype not in DTYPES:
        return f"is {weight.dtype}: INT8 replaces float32 and bfloat16"
    if weight.numel() == 0:
        return "has no weights"
    if not is_finite(weight):
        return "has weights that are infinite or NaN"
    if module.bias is not None and module.bias.shape != weight.shape[:1]:
        return f"has a bias of shape {tuple(module.bias.shape)}, not one for each output"
    if geometry.leaves_outputs_unwritten(module):
        return "has one channel in each group, and padding as large as its kernel"
    return geometry.objection(module)
