"""Finds modules whose class or tensors decide what a model's forward code does.

A rewrite gives a module another class, and may add or remove tensors. So each trace runs again with
the layers in disguise: what then differs depends on what they are. Code that no trace ran is read
(:mod:`transforms.tracing.questions`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.dropout import _DropoutNd

from transforms.rewrites.exchanged_class import own_class
from transforms.rewrites.post_ops import activations
from transforms.rewrites.stand_ins import is_stand_in
from transforms.tracing.calls import Calls
from transforms.tracing.disguises import Disguise
from transforms.tracing.modules import (
    CONVOLUTIONS,
    TRANSPOSED,
    Kinds,
    computes_like,
    frozen_batch_norms,
    is_batch_norm,
    transposed_linears,
)
from transforms.tracing.trace import Trace, UntraceableError

_PRODUCTS: Kinds = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
_LIBRARIES = ("torch.nn.", "fusedoptim.nn.")
_PLAIN = int | float | complex | str | bytes | None | slice | torch.dtype | torch.device
_PLAIN |= torch.layout | torch.memory_format


class Asked:
    """The modules that a model's forward code asks what they are; found when first needed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._reasons: dict[nn.Module, str] | None = None

    def objection(self, module: nn.Module) -> str | None:
        """Why the module must keep its class and tensors, if it must."""
        if self._reasons is None:
            self._reasons = _reasons(self._model)
        return self._reasons.get(module)


def _reasons(model: nn.Module) -> dict[nn.Module, str]:
    """The layers that are asked, and by which code."""
    disguises = _disguises(model)
    if not disguises:
        return {}
    calls = Calls(model, {type(layer) for layer in disguises})
    reasons: dict[nn.Module, str] = {}
    for root, trace in calls.traces.items():
        inside = {m: disguises[m] for m in root.modules() if m in disguises}
        for module in _deciding(calls, root, trace, inside):
            why = f"what forward of {calls.name(root)} does depends on its class or tensors"
            reasons.setdefault(module, why)
    for module, disguise in disguises.items():
        known = [calls.asked, calls.asked_instance] if disguise.is_unrelated else [calls.asked]
        for found in known:
            if module in found:
                reasons.setdefault(module, found[module])
    return reasons


def _disguises(model: nn.Module) -> dict[nn.Module, Disguise]:
    """The layers that a pass may rewrite, and how each may then differ."""
    unrelated: Kinds = (*activations(model), *frozen_batch_norms())
    if not model.training:
        unrelated = (*unrelated, _DropoutNd)
    layers = [m for m in model.modules() if _is_layer(m, unrelated)]
    has_norms = any(map(is_batch_norm, layers))
    return {
        m: Disguise(is_batch_norm(m) or isinstance(m, unrelated), gets_bias=has_norms)
        for m in layers
    }


def _is_layer(module: nn.Module, others: Kinds) -> bool:
    """Whether a pass may rewrite the module."""
    if own_class(module) is not type(module) or is_stand_in(module):  # rewritten already
        return False
    if isinstance(module, nn.MultiheadAttention):
        return True
    if next(module.children(), None) is not None or isinstance(module, torch.jit.ScriptModule):
        return False
    is_other = isinstance(module, others) or is_batch_norm(module)
    is_library = type(module).__module__.startswith(_LIBRARIES)
    return is_other or is_library or computes_like(module, (*_PRODUCTS, *transposed_linears()))


def _deciding(
    calls: Calls, root: nn.Module, plain: Trace, disguises: dict[nn.Module, Disguise]
) -> Collection[nn.Module]:
    """The modules in ``root`` without whose disguise its trace is another: all of some classes."""
    if not disguises or _Path(plain) == _traced(calls, root, disguises):
        return []
    again = _traced(calls, root, {})  # what the first trace ran only once, as a cache does, is done
    if again == _traced(calls, root, disguises):
        return []
    if again != _traced(calls, root, {}):
        calls.ask_code(root)
        return []
    found: list[nn.Module] = []
    for kind in {type(module) for module in disguises}:
        alone = {m: d for m, d in disguises.items() if type(m) is kind}
        if again != _traced(calls, root, alone):
            found += alone
    return found or list(disguises)


def _traced(calls: Calls, root: nn.Module, disguises: dict[nn.Module, Disguise]) -> _Path | None:
    """The path with some modules in disguise; None if the trace fails."""
    try:
        return _Path(calls.trace(root, disguises))
    except UntraceableError:
        return None


class _Path:
    """What code did in a trace: the lines that ran, the graph, and the tensors that it made."""

    def __init__(self, trace: Trace) -> None:
        self._lines = trace.watch.lines()
        self._made = list(trace.made.values())
        places = {node: place for place, node in enumerate(trace.graph.nodes)}
        self._nodes = [
            (node.op, _identity(node.target), *_described((node.args, node.kwargs), places))
            for node in places
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Path):
            return NotImplemented
        is_same = self._nodes == other._nodes and self._lines == other._lines
        return is_same and all(map(_are_equal, self._made, other._made))


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal bits, or may have, if their class is not torch's."""
    if type(a) is not Tensor or type(b) is not Tensor or a.layout is not torch.strided:
        return True
    if a.is_meta or (a.dtype, a.shape) != (b.dtype, b.shape):
        return a.shape == b.shape
    return torch.equal(*(t.detach().reshape(-1).view(torch.uint8) for t in (a, b)))


def _identity(value: object) -> str | type:
    """What names a function, a method or a class, whichever copy of a model it belongs to."""
    if isinstance(value, str):
        return value
    name: str | None = getattr(value, "__qualname__", None)
    return name or type(value)


def _described(value: object, places: dict[fx.Node, int]) -> Iterator[Hashable]:
    """What can be compared between the arguments of two graphs' nodes."""
    if isinstance(value, fx.Node):
        yield fx.Node, places[value]
    elif isinstance(value, (tuple, list)):
        yield type(value), len(value)
        for item in value:
            yield from _described(item, places)
    elif isinstance(value, dict):
        yield dict, *map(repr, value)
        for item in value.values():
            yield from _described(item, places)
    elif isinstance(value, _PLAIN):
        yield type(value), repr(value)
    else:
        yield type(value), _identity(value)
