"""All calls of a model's modules, in all traces of its forward code.

A function that torch.fx cannot trace becomes a leaf. So does a module whose own ``forward`` it
cannot trace; the module's children are traced separately. Code that did not run, in a leaf or
behind a condition, is read from its source.
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import fx, nn

from transforms.tracing.disguises import Disguise
from transforms.tracing.modules import has_hooks
from transforms.tracing.source import (
    Reader,
    Use,
    changing_attributes,
    dispatches,
    modules_behind,
    modules_of_function,
)
from transforms.tracing.trace import Trace, UntraceableError, run_trace


class Calls:
    """All calls of all modules of a model in eval mode, traced on copies.

    Modules of the classes in ``leaves`` are not entered, nor are torch's own.
    """

    def __init__(self, model: nn.Module, leaves: Collection[type[nn.Module]] = ()) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._leaf_types: set[type] = set(leaves)
        self.doubtful: dict[nn.Module, str] = {}
        """Modules that code which was not traced may call or read, and that code."""
        self.traces: dict[nn.Module, Trace] = {}
        """The traces of code that could be traced, by the module whose forward it is."""
        self.leaf_functions: set[types.FunctionType] = set()
        """The functions that cannot be traced."""
        self.of: dict[nn.Module, list[fx.Node]] = {}
        """The calls of each module."""
        self.read: set[nn.Module] = set()
        """Modules whose tensors are read without a call."""
        self.kept: set[fx.Node] = set()
        """Values that forward stores where other code may read them."""
        self.undecided: set[fx.Node] = set()
        """Values that a function holds when it evaluates an open condition."""
        self.module_of: dict[fx.Node, nn.Module] = {}
        """The module of each call."""
        kinds = {type(module) for module in model.modules()}
        self._changing = changing_attributes(kinds)
        if model.training:  # the model may be evaluated later
            values = self._changing.values | {"training"}
            self._changing = self._changing._replace(values=values)
        self._waiting = [model]
        self._seen = {model}
        self._roots: set[nn.Module] = set()
        dispatching = {kind for kind in kinds if dispatches(kind)}
        for module in model.modules():
            if type(module) in dispatching:
                why = f"inside {self.name(module)}, which has a singledispatchmethod"
                self._distrust(module, why)
        while self._waiting:
            self._explore(self._waiting.pop())

    def _is_leaf(self, module: nn.Module) -> bool:
        return (
            has_hooks(module)
            or type(module) in self._leaf_types
            or "forward" in vars(module)
            or isinstance(module, torch.jit.ScriptModule)
        )

    def _explore(self, root: nn.Module) -> None:
        """Trace ``root``; if its own code cannot be traced, explore its children instead."""
        if root in self._roots:
            return
        self._roots.add(root)
        if type(root).__call__ is not nn.Module.__call__:
            self._distrust(root, f"inside {self.name(root)}, which overrides __call__")
            return
        while type(root) not in self._leaf_types and "forward" not in vars(root):
            try:
                trace = self.trace(root)
            except UntraceableError as error:
                if error.function is not None and error.function not in self.leaf_functions:
                    self.leaf_functions.add(error.function)
                    continue
                known = type(error.culprit) in self._leaf_types
                self._leaf_types.add(type(root if known else error.culprit))
            else:
                self.traces[root] = trace
                self._add(trace)
                self.undecided |= trace.watch.undecided
                for use in trace.watch.uses(root):
                    code = f"code of {self.name(root)} that did not run"
                    self._suspect(use, code)
                return
        self._open(root)

    def trace(
        self, root: nn.Module, disguises: Mapping[nn.Module, Disguise] | None = None
    ) -> Trace:
        """Trace the forward of ``root``, with some leaves in disguise."""
        return run_trace(root, self._is_leaf, self.leaf_functions, self._changing, disguises or {})

    def _add(self, trace: Trace) -> None:
        self.kept |= trace.kept
        self.read |= trace.read
        for node in trace.graph.nodes:
            if node.op == "call_module":
                module = trace.modules[node.target]
                self.of.setdefault(module, []).append(node)
                self.module_of[node] = module
                self._queue(module)
            elif node.target in self.leaf_functions:
                for module in modules_of_function(node.target):
                    self._distrust(module, f"used by {describe(node, self)}")

    def _queue(self, module: nn.Module) -> None:
        """Queue the children of a leaf to be explored too."""
        if module in self._seen:
            return
        self._seen.add(module)
        if next(module.children(), None) is None:
            return
        if self._is_leaf(module) and not _is_opaque(module):
            self._waiting.append(module)
        else:
            self._distrust(module, f"inside {self.name(module)}, a module of torch itself")

    def _open(self, leaf: nn.Module) -> None:
        """Explore the children of a module whose own code cannot be traced."""
        for attribute, value in vars(leaf).items():
            if attribute != "_modules":
                for module in modules_behind(value):
                    why = f"{self.name(leaf)} cannot be traced and also holds it in {attribute}"
                    self._distrust(module, why)
        for use in Reader(leaf).forward(leaf):
            code = f"{self.name(leaf)}, whose forward cannot be traced,"
            self._suspect(use, code)

    def _suspect(self, use: Use, code: str) -> None:
        """Note what code may do with a module, and explore the module if it may be called."""
        if not use.is_call:
            name = self.name(use.module)
            self._distrust(use.module, f"{code} does more with {name} than call it")
            return
        for module in _callable(use.module):
            self._seen.add(module)
            if next(module.children(), None) is None:
                self.doubtful.setdefault(module, f"called by {code.rstrip(',')}")
            elif _is_opaque(module):
                self._distrust(module, f"inside {self.name(module)}, a module of torch itself")
            else:
                self._waiting.append(module)

    def _distrust(self, parent: nn.Module, why: str) -> None:
        for module in parent.modules():
            self.doubtful.setdefault(module, why)

    def escape(self, feeder: nn.Module, values: Collection[fx.Node]) -> str | None:
        """How other code may see ``values``, the output of ``feeder``, if it may."""
        if not self.kept.isdisjoint(values):
            return f"{self.name(feeder)}'s output is stored where other code may read it"
        if not self.undecided.isdisjoint(values):
            return (
                f"{self.name(feeder)}'s output is in use where forward evaluates a condition "
                "that may differ in another call"
            )
        return None

    def name(self, module: nn.Module) -> str:
        """The module's name in the model, or its class."""
        return self._names.get(module) or type(module).__name__


def _is_opaque(module: nn.Module) -> bool:
    """Whether torch.fx does not trace it: torch's own modules except Sequential."""
    is_torchs = type(module).__module__.startswith("torch.")
    return is_torchs and not isinstance(module, nn.Sequential)


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in a ModuleList or ModuleDict, or the module itself."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _callable(child)
    else:
        yield module


def describe(node: fx.Node | None, calls: Calls) -> str:
    """Name a value for a reader of the report."""
    if node is None:
        return "more than one value"
    if node.op == "call_module":
        module = calls.module_of[node]
        return f"{calls.name(module)} ({type(module).__name__})"
    if node.op == "placeholder":
        return f"the argument {node.target}"
    if node.op == "output":
        return "what forward returns"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    return f"{name}()"
