"""Pass: lay out the weights of convolutions in channels_last.

A convolution whose weight or input is in channels_last computes in that layout, and torch's layers
preserve it. Later code may depend on strides: ``x.view(...)`` of such an output fails, where
``x.reshape(...)`` does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedoptim.split.pages import has_sole_owner, release_pages
from transforms.inputs.sample import caller, seconds, trial
from transforms.passes.pack_weights import PackWeights
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import geometry, plain_tensors
from transforms.rewrites.undoing import Undo
from transforms.tracing.modules import COMPUTED, computes_like, has_computed_tensors
from transforms.tracing.source import names_used

_FORMATS = {
    nn.Conv2d: torch.channels_last,
    nn.ConvTranspose2d: torch.channels_last,
    nn.Conv3d: torch.channels_last_3d,
    nn.ConvTranspose3d: torch.channels_last_3d,
}
_STRIDES = "_fusedoptim_strides"
_READS_STRIDES = {"view", "view_as", "as_strided", "is_contiguous", "parameters_to_vector"}
_ROUNDS = 2
_CLEARLY = 1.2
"""If one layout takes this many times as long as the other, they are not timed again."""

Convolutions = list[tuple[str, Any, torch.memory_format]]
"""Names and modules, with the memory format for the dimensions of each."""


_default: bool | None = None


def enable_auto_channels_last() -> None:
    """Make :func:`transforms.optimize` use channels_last on every device and level.

    Example:
        >>> from fusedoptim import transforms
        >>> transforms.enable_auto_channels_last()
        >>> transforms.disable_auto_channels_last()
    """
    global _default
    _default = True


def disable_auto_channels_last() -> None:
    """Make :func:`transforms.optimize` keep memory formats, unless a call asks for a change.

    Example:
        >>> from fusedoptim import transforms
        >>> transforms.disable_auto_channels_last()
    """
    global _default
    _default = False


class ChannelsLast(Pass):
    """Lays out the weights of 2-d and 3-d convolutions, also transposed ones, channels last.

    By default it does so only on the CPU, if the model's code does not depend on strides and, in
    eval mode with a sample input, if that makes the model faster. The model is timed with packed
    weights if packing will follow. With True it always does.
    """

    knob = "auto_channels_last"

    def default(self, level: str) -> bool:
        """What :func:`enable_auto_channels_last` or its opposite set, else the level's default."""
        return super().default(level) if _default is None else _default

    def run(self, job: Job) -> list[Entry]:
        """Change strides; entries are the convolutions that are not in channels_last already."""
        entries: list[Entry] = []
        changed: Convolutions = []
        for name, module, layout in _convolutions(job.model):
            reason = _objection(module)
            if reason is None:
                changed.append((name, module, layout))
            else:
                entries.append(Entry(name, reason, done=False))
        if not changed:
            return entries
        job.undo.callback(_undo, [module for _, module, _ in changed])
        is_forced = self.knob in job.options.explicit or bool(_default)
        why = None if is_forced else _no_gain(job.model)
        is_timed = job.sample_input is not None and not is_forced and not job.model.training
        if why is None and is_timed:
            with trial(job.model, job.options.dtype), Undo() as undo:
                packing = PackWeights()
                if packing.is_on(job.options):  # packing gains only in this layout
                    packing.run(job._replace(undo=undo))
                why = _slower(caller(job.model, job.sample_input), changed)
        if why is None:
            _lay_out(changed)
        what = why or "weight in channels_last"
        return entries + [Entry(name, what, done=why is None) for name, *_ in changed]

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Give every weight its original strides, and keep its current values."""
        _undo(model.modules())


def _undo(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        strides = vars(module).get(_STRIDES)
        if strides is None:
            continue
        weight = module._parameters.get("weight")
        if weight is not None and weight.dim() == len(strides):
            _put(weight, functools.partial(plain_tensors.with_strides, strides=strides))
        vars(module).pop(_STRIDES)  # last: after an interrupt, this is repeated


def _convolutions(model: nn.Module) -> Iterator[tuple[str, Any, torch.memory_format]]:
    """The convolutions whose weight is not in channels_last already."""
    for name, module in model.named_modules():
        kind = next((kind for kind in _FORMATS if isinstance(module, kind)), None)
        if kind is None:
            continue
        layout = _FORMATS[kind]
        weight = module._parameters.get("weight")
        if weight is None or not weight.is_contiguous(memory_format=layout):
            yield name, module, layout


def _objection(module: Any) -> str | None:
    if has_computed_tensors(module):
        return COMPUTED
    if module.weight is None:
        return "has no weight"
    return None if computes_like(module, tuple(_FORMATS)) else "overrides its methods"


def _lay_out(convolutions: Convolutions) -> None:
    for _, module, _ in convolutions:  # before any changes, as two modules may share a weight
        attributes: dict[str, Any] = module.__dict__
        attributes[_STRIDES] = module.weight.stride()
    for _, module, layout in convolutions:
        _put(module.weight, functools.partial(torch.Tensor.contiguous, memory_format=layout))


def _put(param: nn.Parameter, laid_out: Callable[[Tensor], Tensor]) -> None:
    """Change the layout of a parameter and its gradient, which must match."""
    is_alone, before, grad = has_sole_owner(param), param.data, param.grad
    if grad is not None and grad.layout is torch.strided:
        grad = laid_out(grad)
    param.data = laid_out(before)
    param.grad = grad
    if is_alone and param.data_ptr() != before.data_ptr():
        release_pages(before)  # malloc may keep the block


def _no_gain(model: nn.Module) -> str | None:
    """Why the layout may be slower or unsafe, if it may."""
    device = next(model.parameters()).device.type
    if device != "cpu":
        return f"not known to be faster on {device}; auto_channels_last=True applies it anyway"
    for cls in dict.fromkeys(map(type, model.modules())):
        if used := sorted(names_used(cls) & _READS_STRIDES):
            return (
                f"{cls.__name__}.forward uses {used[0]}, which depends on the layout; "
                "auto_channels_last=True applies it anyway"
            )
    for name, module in model.named_modules():
        if geometry.may_crash(module):
            return f"{name} {geometry.OBJECTION}; auto_channels_last=True applies it anyway"
    return None


def _slower(call: Callable[[], object], changed: Convolutions) -> str | None:
    """Why not to use channels_last, if it is not faster.

    The two layouts are timed alternately, until one is clearly faster.
    """
    before = after = math.inf
    for _ in range(_ROUNDS):
        before = min(before, seconds(call))
        _lay_out(changed)
        try:
            after = min(after, seconds(call))
        except RuntimeError as error:
            return f"the model fails with it on the sample: {error}"
        finally:
            _undo(module for _, module, _ in changed)
        if max(before, after) > _CLEARLY * min(before, after):
            break
    if after < before:
        return None
    return f"slower on the sample: {after * 1e3:.3g} ms instead of {before * 1e3:.3g} ms"
