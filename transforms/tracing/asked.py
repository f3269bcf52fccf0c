"""Finds modules whose class or tensors decide what a model's forward code does.

A rewrite gives a module another class, and may add or remove tensors. So each trace runs again with
the layers in disguise: what then differs depends on their classes and tensors. Code that no trace
ran is read (:mod:`transforms.tracing.questions`).
"""

from __future__ import annotations

import enum
import types
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping

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
from transforms.tracing.questions import (
    Question,
    names_in,
    questions_in,
    questions_in_bytecode,
    questions_of,
)
from transforms.tracing.reachable import Reachable, functions_among, method_of
from transforms.tracing.source import all_names, is_torchs
from transforms.tracing.trace import Trace, UntraceableError

_PRODUCTS: Kinds = (*CONVOLUTIONS, *TRANSPOSED, nn.Linear)
_LIBRARIES = ("torch.nn.", "fusedoptim.nn.")
_PLAIN = int | float | complex | str | bytes | None | slice | range | enum.Enum | torch.dtype
_PLAIN |= torch.device | torch.layout | torch.memory_format
_ENTRIES = ("forward", "__call__", "__getattr__", "__getattribute__")
"""Methods of a module that its caller reaches."""


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
    traced: set[nn.Module] = set()
    """The modules whose code ran in a trace that can be compared with another."""
    code = _Code(disguises, calls)
    for root, trace in calls.traces.items():
        inside = {m: disguises[m] for m in root.modules() if m in disguises}
        deciding = _deciding(calls, root, trace, inside)
        if deciding is not None:
            traced |= trace.watch.entered
            why = f"what forward of {calls.name(root)} does depends on its class or tensors"
            reasons |= dict.fromkeys(deciding, why)
        code.ask_not_run(root, trace)
    for module in model.modules():
        if not is_torchs(type(module)) and module not in traced and module not in disguises:
            code.ask_all(module)
    code.ask_functions(model)
    return {**code.reasons, **reasons}


class _Code:
    """The layers that code asks, without running it."""

    def __init__(self, disguises: Mapping[nn.Module, Disguise], calls: Calls) -> None:
        self._disguises = disguises
        self._calls = calls
        self._known: dict[types.FunctionType, set[Question]] = {}
        self._of_methods: dict[frozenset[types.FunctionType], set[Question]] = {}
        self.reasons: dict[nn.Module, str] = {}

    def ask_all(self, module: nn.Module) -> None:
        """Find what any forward code of a module may ask the layers in it."""
        code = f"{self._calls.name(module)}, whose forward was not traced,"
        self._put(self._of_forward(module), module, code)

    def _of_forward(self, module: nn.Module) -> set[Question]:
        reachable = Reachable(module, self._disguises)
        if "forward" not in vars(module):
            if reachable.methods not in self._of_methods:
                questions = self._questions(reachable.from_names(_ENTRIES))
                self._of_methods[reachable.methods] = questions
            return self._of_methods[reachable.methods]
        forward = method_of(module, "forward")
        if forward is None:  # nothing is known
            return {Question("class", None)}
        return self._questions(reachable.from_functions([forward]))

    def ask_not_run(self, root: nn.Module, trace: Trace) -> None:
        """Find what code that a trace did not run may ask the layers in ``root``."""
        questions: set[Question] = set()
        names: set[str] = set()
        functions: set[types.FunctionType] = set()
        for code, source, namespace in trace.watch.not_run():
            if isinstance(code, types.CodeType):
                questions.update(questions_in_bytecode(code))
                mentioned = all_names(code)
            else:
                assert source is not None
                questions.update(questions_in(code, source, namespace))
                mentioned = names_in(code)
            names |= mentioned
            functions |= functions_among(map(namespace.get, mentioned))
        if names:
            reachable = Reachable(root, self._disguises)
            questions |= self._questions(reachable.from_functions(functions))
            names = {name for name in names if not hasattr(Tensor, name)}
            questions |= self._questions(reachable.from_names(names))
        self._put(questions, root, f"code of {self._calls.name(root)} that did not run")

    def ask_functions(self, model: nn.Module) -> None:
        """Find what functions that cannot be traced may ask."""
        if not self._calls.leaf_functions:
            return
        reachable = Reachable(model, self._disguises)
        for function in self._calls.leaf_functions:
            questions = self._questions(reachable.from_functions([function]))
            self._put(questions, model, f"{function.__name__}(), which cannot be traced,")

    def _questions(self, functions: Iterable[types.FunctionType]) -> set[Question]:
        found: set[Question] = set()
        for function in functions:
            if function not in self._known:
                self._known[function] = set(questions_of(function))
            found |= self._known[function]
        return found

    def _put(self, questions: Collection[Question], scope: nn.Module, code: str) -> None:
        for layer in scope.modules():
            disguise = self._disguises.get(layer)
            if disguise is not None and any(q.concerns(layer, disguise) for q in questions):
                what = f"{code} may ask what {self._calls.name(layer)} is"
                self.reasons.setdefault(layer, what)


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
    own = own_class(module)
    if is_stand_in(module) or not issubclass(type(module), own):
        return False  # another class already, so it is not asked
    if isinstance(module, nn.MultiheadAttention):
        return True
    if next(module.children(), None) is not None or isinstance(module, torch.jit.ScriptModule):
        return False
    is_other = isinstance(module, others) or is_batch_norm(module)
    is_library = type(module).__module__.startswith(_LIBRARIES)
    return is_other or is_library or computes_like(module, (*_PRODUCTS, *transposed_linears()))


def _deciding(
    calls: Calls, root: nn.Module, plain: Trace, disguises: dict[nn.Module, Disguise]
) -> Collection[nn.Module] | None:
    """The layers of the classes that decide what a trace of ``root`` does.

    None if it does something else in each trace.
    """
    if not disguises or _Path(plain) == _traced(calls, root, disguises):
        return []
    again = _traced(calls, root, {})  # the first trace may have filled caches
    if again == _traced(calls, root, disguises):
        return []
    if again != _traced(calls, root, {}):
        return None
    found: set[nn.Module] = set()
    for kind in {type(layer) for layer in disguises}:
        alone = {m: d for m, d in disguises.items() if type(m) is kind}
        if again != _traced(calls, root, alone):
            found |= alone.keys()
    # Where one question is about several classes, each alone may not decide it.
    others = {m: d for m, d in disguises.items() if m not in found}
    if others and again != _traced(calls, root, others):
        unrelated = {m: d for m, d in others.items() if d.is_unrelated}
        found |= unrelated.keys()
        related = {m: d for m, d in others.items() if m not in unrelated}
        if again != _traced(calls, root, related) or again == _traced(calls, root, unrelated):
            found |= related.keys()
    return found


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
    """Whether two tensors have equal bits; only their kinds, if these cannot be compared."""
    if (type(a), a.layout, a.dtype, a.device) != (type(b), b.layout, b.dtype, b.device):
        return False
    is_special = a.is_nested or a.is_quantized or a.is_conj() or a.is_neg() or a.is_meta
    if type(a) is not Tensor or a.layout is not torch.strided or is_special:
        return True
    if a.shape != b.shape:
        return False
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
