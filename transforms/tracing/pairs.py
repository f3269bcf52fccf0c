"""Which convolution or Linear feeds which BatchNorm, and nothing else.

A pair is one only if every use of either is a call of both. ``torch.fx`` traces the model, and a
watch notes what the graph does not show. A function that torch.fx cannot trace becomes a box; so
does a module whose own ``forward`` it cannot, and what is inside is traced by itself. What code
that did not run may do is read from its source. docs/design/folding.md has the whole argument.
"""

from __future__ import annotations

import copy
import inspect
import traceback
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from transforms.tracing.modules import (
    BATCH_NORMS,
    all_hooks,
    has_computed_tensors,
    has_hooks,
    is_batch_norm,
    own_tensors,
    plain_kind,
)
from transforms.tracing.source import Reader, Use, modules_behind, modules_of_function, reads_only
from transforms.tracing.watch import TensorReads, Watch

Kinds = tuple[type[nn.Module], ...]
_OF_SHAPE = {"shape", "ndim", "device", "dtype", "is_cuda", "requires_grad", "layout"}
_SHAPE_METHODS = {"size", "dim", "ndimension", "numel", "nelement", "get_device"}
_GEOMETRY = {"stride", "kernel_size", "dilation", "padding", "groups"}
_GEOMETRY |= {"in_channels", "out_channels", "in_features", "out_features", "training"}
_SHAPE_OF_OTHER = {"reshape_as", "view_as", "expand_as"}


class _Proxy(fx.Proxy):
    """A traced value, which code that asks takes for a tensor, as it does at run time."""

    _is_param = _is_buffer = False  # what torch.nn.Parameter and Buffer ask a tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Tensor

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(Tensor, name):  # such as weight.data = ...
            raise RuntimeError(f"forward sets {name} of a tensor, which a trace does not record")
        super().__setattr__(name, value)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self, is_box: Callable[[nn.Module], bool], functions: set[types.FunctionType]
    ) -> None:
        super().__init__(autowrap_functions=tuple(functions))
        self._is_box = is_box
        self.culprit: nn.Module | None = None
        """The innermost module whose own code could not be traced."""
        self._made: list[tuple[fx.Node, weakref.ref[_Proxy]]] = []
        self._tensors: dict[nn.Module, list[int]] = {}
        self.exchanged: set[nn.Module] = set()
        """Modules that were called with other tensors than their own."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._tensors = {m: _identities(m) for m in root.modules()}
        return super().trace(root, concrete_args)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        proxy = _Proxy(node, self)
        self._made.append((node, weakref.ref(proxy)))
        return proxy

    def kept(self) -> set[fx.Node]:
        """Values that somebody still holds: a module, a list, whatever it may be."""
        return {node for node, proxy in self._made if proxy() is not None}

    def create_arg(self, a: Any) -> Any:
        if type(a) is _Proxy:  # before anything asks whether it is a tensor
            return a.node
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_box(m) or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if _identities(m) != self._tensors.get(m):
            self.exchanged.add(m)
        self.path_of_module(m)  # raises for a module that is not registered: the caller's fault
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if not self.is_leaf_module(m, ""):
                self.culprit = self.culprit or m
            raise


def _identities(module: nn.Module) -> list[int]:
    return [id(tensor) for _, tensor in own_tensors(module)]


class _Trace(NamedTuple):
    graph: fx.Graph
    modules: dict[str, nn.Module]
    """The model's own, by the names that the graph has for them."""
    kept: set[fx.Node]
    """Values that forward keeps somewhere, where others find them."""
    read: set[nn.Module]
    """Modules whose tensors are read or exchanged, which the graph does not show."""


class _UntraceableError(Exception):
    def __init__(self, culprit: nn.Module, function: types.FunctionType | None) -> None:
        self.culprit = culprit
        self.function = function
        """What its forward called that could not be traced, if it was a plain function."""


def _function_to_blame(error: BaseException, culprit: nn.Module) -> types.FunctionType | None:
    """The function that ``culprit.forward`` called, by a global name, when it failed."""
    forward = inspect.unwrap(type(culprit).forward)
    stack = traceback.walk_tb(error.__traceback__)
    codes = [frame.f_code for frame, _ in stack]
    if not isinstance(forward, types.FunctionType) or forward.__code__ not in codes[:-1]:
        return None
    below = codes[len(codes) - codes[::-1].index(forward.__code__) :]
    called = forward.__globals__.get(below[0].co_name) if below else None
    is_it = isinstance(called, types.FunctionType) and called.__code__ is below[0]
    return called if is_it else None


def _trace(
    root: nn.Module,
    is_box: Callable[[nn.Module], bool],
    functions: set[types.FunctionType],
    constants: dict[str, Any],
    watch: Watch,
) -> _Trace:
    """The graph of ``root``, traced on a copy that shares its tensors, as forward may write to it.

    Args:
        root: whose forward is traced.
        is_box: tells modules that are not traced, but calls to them are.
        functions: that are not traced either.
        constants: arguments that are what they are, and not traced.
        watch: follows the code that runs.

    Raises:
        _UntraceableError: names the module whose code is to blame.
    """
    memo: dict[int, Any] = {id(t): t for t in [*root.parameters(), *root.buffers()]}
    memo |= {id(hooks): OrderedDict() for m in root.modules() for hooks in all_hooks(m)}
    originals: dict[nn.Module, nn.Module] = {}
    try:
        clone = copy.deepcopy(root, memo)
        originals = {memo[id(m)]: m for m in root.modules()}
    except Exception as error:  # of any class: the model's own
        raise _UntraceableError(root, None) from error
    tracer = _Tracer(lambda m: is_box(originals[m]), functions)
    reads = TensorReads(clone.modules())
    try:
        with watch.following(originals), reads:
            graph = tracer.trace(clone, concrete_args=constants or None)
    except Exception as error:
        culprit = originals.get(tracer.culprit or clone, root)
        raise _UntraceableError(culprit, _function_to_blame(error, culprit)) from error
    modules = {
        node.target: originals[clone.get_submodule(node.target)]
        for node in graph.nodes
        if node.op == "call_module"
    }
    named = dict(clone.named_modules(remove_duplicate=False))
    handed_over: set[nn.Module] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            whole = named.get(node.target)
            modules[node.target] = originals[whole or named[node.target.rpartition(".")[0]]]
            if whole is not None and not all(_asks_geometry(user, node) for user in node.users):
                handed_over.update(modules[node.target].modules())
    read = handed_over | {originals[module] for module in reads.of | tracer.exchanged}
    return _Trace(graph, modules, tracer.kept(), read)


def _ways_to_call(root: nn.Module) -> list[dict[str, Any]]:
    """Which optional arguments to hold constant: all, none, and all but each.

    A trace takes what it is given for a tensor, and so follows one branch of ``if mask is None``.
    """
    optional = {
        name: parameter.default
        for name, parameter in inspect.signature(type(root).forward).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    ways = [optional]
    if optional:
        ways.append({})
    if len(optional) > 1:
        ways += [{k: v for k, v in optional.items() if k != name} for name in optional]
    return ways


class _Calls:
    """Every call of every module, in all traces."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._boxed_types: set[type] = set()
        self._boxed_functions: set[types.FunctionType] = set()
        self.unknown: dict[nn.Module, str] = {}
        """Modules that code which nobody could follow may call or read, and which code."""
        self.doubtful: dict[nn.Module, str] = {}
        """Modules that code which was not run may call or read, and which code."""
        self.of: dict[nn.Module, list[fx.Node]] = {}
        self.read: set[nn.Module] = set()
        """Modules whose tensors are used without calling them."""
        self.kept: set[fx.Node] = set()
        self.undecided: set[fx.Node] = set()
        """Values that a function holds when it evaluates a condition that is not fixed."""
        self.module_of: dict[fx.Node, nn.Module] = {}
        self._waiting = [model]
        self._seen = {model}
        self._roots: set[nn.Module] = set()
        while self._waiting:
            self._explore(self._waiting.pop())

    def _is_box(self, module: nn.Module) -> bool:
        return (
            has_hooks(module)
            or type(module) in self._boxed_types
            or "forward" in vars(module)
            or isinstance(module, torch.jit.ScriptModule)
        )

    def _explore(self, root: nn.Module) -> None:
        """Trace ``root``, or if its own code does not trace, what is inside."""
        if root in self._roots:
            return
        self._roots.add(root)
        if type(root).__call__ is not nn.Module.__call__:
            self._distrust(root, f"inside {self.name(root)}, which has a __call__ of its own")
            return
        while type(root) not in self._boxed_types and "forward" not in vars(root):
            watch = Watch()
            try:
                traces = [
                    _trace(root, self._is_box, self._boxed_functions, constants, watch)
                    for constants in _ways_to_call(root)
                ]
            except _UntraceableError as error:
                if error.function is not None and error.function not in self._boxed_functions:
                    self._boxed_functions.add(error.function)
                    continue
                known = type(error.culprit) in self._boxed_types
                self._boxed_types.add(type(root if known else error.culprit))
            else:
                for trace in traces:
                    self._add(trace)
                self.undecided |= watch.undecided
                for use in watch.uses(root):
                    code = f"code of {self.name(root)} that was not traced"
                    self._suspect(use, code, self.doubtful)
                return
        self._open(root)

    def _add(self, trace: _Trace) -> None:
        self.kept |= trace.kept
        self.read |= trace.read
        for node in trace.graph.nodes:
            if node.op == "get_attr":
                if not all(_asks_geometry(u, node) or _reads_shape(u, node) for u in node.users):
                    self.read.add(trace.modules[node.target])
            elif node.op == "call_module":
                module = trace.modules[node.target]
                self.of.setdefault(module, []).append(node)
                self.module_of[node] = module
                self._queue(module)
            elif node.target in self._boxed_functions:
                for module in modules_of_function(node.target):
                    self._distrust(module, f"used by {_describe(node, self)}")

    def _queue(self, module: nn.Module) -> None:
        """See that what is inside a module which a trace takes for a box is explored too."""
        if module in self._seen:
            return
        self._seen.add(module)
        if next(module.children(), None) is None:
            return
        if self._is_box(module) and not _is_opaque(module):
            self._waiting.append(module)
        else:
            self._distrust(module, f"inside {self.name(module)}, whose code is torch's own")

    def _open(self, box: nn.Module) -> None:
        """Explore the children of a module whose own code could not be traced."""
        for attribute, value in vars(box).items():
            if attribute != "_modules":
                for module in modules_behind(value):
                    why = f"{self.name(box)} cannot be traced and has it in {attribute} too"
                    self._distrust(module, why)
        for use in Reader(box).forward(box):
            code = f"{self.name(box)}, whose forward cannot be traced"
            self._suspect(use, code, self.unknown)

    def _suspect(self, use: Use, code: str, reasons: dict[nn.Module, str]) -> None:
        """Take note of what code may do with a module, and explore what it may call."""
        if not use.is_call:
            name = self.name(use.module)
            why = f"used by {code}, which does more with {name} than call it"
            self._distrust(use.module, why, reasons)
            return
        for module in _callable(use.module):
            self._seen.add(module)
            if next(module.children(), None) is None:
                reasons.setdefault(module, f"called by {code}")
            elif _is_opaque(module):
                self._distrust(module, f"inside {self.name(module)}, whose code is torch's own")
            else:
                self._waiting.append(module)

    def _distrust(
        self, parent: nn.Module, why: str, reasons: dict[nn.Module, str] | None = None
    ) -> None:
        for module in parent.modules():
            (self.unknown if reasons is None else reasons).setdefault(module, why)

    def name(self, module: nn.Module) -> str:
        """What a reader would call it."""
        return self._names.get(module) or type(module).__name__


def _is_opaque(module: nn.Module) -> bool:
    """Whether torch.fx does not look inside: code of torch's own, Sequential excepted."""
    is_torchs = type(module).__module__.startswith("torch.")
    return is_torchs and not isinstance(module, nn.Sequential)


def _callable(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in a list or dict of modules, or the module itself."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        for child in module.children():
            yield from _callable(child)
    else:
        yield module


class Pairs(NamedTuple):
    """The BatchNorms of a model, with what feeds them."""

    feeders: dict[nn.Module, nn.Module]
    """by BatchNorm: the module whose output goes to it and nowhere else."""
    reasons: dict[nn.Module, tuple[nn.Module | None, str]]
    """by BatchNorm that has none: the module that comes before it, if known, and why not."""


def find_pairs(model: nn.Module, kinds: Kinds) -> Pairs:
    """Find what feeds each BatchNorm of ``model``.

    Args:
        model: in eval mode; not written to.
        kinds: of modules that may feed one.
    """
    norms = [m for m in model.modules() if is_batch_norm(m)]
    pairs = Pairs({}, {})
    if norms:
        calls = _Calls(model)
        for norm in norms:
            feeder, reason = _feeder(norm, calls, kinds)
            if reason is None and feeder is not None:
                pairs.feeders[norm] = feeder
            else:
                pairs.reasons[norm] = (feeder, reason or "nothing comes before it")
    return pairs


def _feeder(norm: nn.Module, calls: _Calls, kinds: Kinds) -> tuple[nn.Module | None, str | None]:
    """What feeds ``norm``, and why the two are not a pair, if they are not."""
    if plain_kind(norm, BATCH_NORMS) is None:
        return None, f"{type(norm).__name__} has code of its own"
    if norm in calls.unknown:
        return None, calls.unknown[norm]
    if norm not in calls.of:
        return None, "forward does not call it"
    sources = [_source(node) for node in calls.of[norm]]
    feeders = {calls.module_of.get(source) for source in sources if source is not None}
    feeder = feeders.pop() if len(feeders) == 1 and None not in sources else None
    if feeder is None or not isinstance(feeder, kinds):
        follows = {_describe(source, calls) for source in sources}
        return None, f"follows {' and '.join(sorted(follows))}, not a convolution or Linear"
    return feeder, _objection(norm, feeder, calls, kinds)


def _objection(norm: nn.Module, feeder: nn.Module, calls: _Calls, kinds: Kinds) -> str | None:
    """Why ``norm`` and what comes before it are not a pair after all."""
    if has_computed_tensors(feeder):
        return f"{calls.name(feeder)} has a weight that is computed from others (a parametrization)"
    if plain_kind(feeder, kinds) is None:
        return f"{calls.name(feeder)} ({type(feeder).__name__}) has code of its own"
    if feeder in calls.unknown:
        return f"follows {calls.name(feeder)}: {calls.unknown[feeder]}"
    for module in (norm, feeder):
        if has_hooks(module):
            return f"{calls.name(module)} has hooks, which would see other values"
        if module in calls.read:
            return f"{calls.name(module)} has tensors that forward uses directly"
    if not isinstance(feeder, nn.Linear) and any(
        _inputs(n)[0] is not _source(n) for n in calls.of[norm]
    ):
        return f"{calls.name(feeder)}'s output is flattened first, channels and all"
    for node in calls.of[feeder]:
        for user in _users(node):
            if calls.module_of.get(user) is not norm:
                return f"{calls.name(feeder)} also feeds {_describe(user, calls)}"
        if any(between in calls.kept for between in _same_rows(node)):
            return f"{calls.name(feeder)}'s output is kept for others to read"
    for node in calls.of[feeder]:
        if any(between in calls.undecided for between in _same_rows(node)):
            return (
                f"{calls.name(feeder)}'s output is at hand where forward evaluates a condition "
                "that another call may decide otherwise"
            )
    for module in (norm, feeder):
        if module in calls.doubtful:
            return f"{calls.name(module)} may be {calls.doubtful[module]}"
    return None


def _source(call: fx.Node) -> fx.Node | None:
    """The node whose rows a BatchNorm's call gets, through any flattening."""
    inputs = _inputs(call)
    node = inputs[0] if len(inputs) == 1 else None
    while isinstance(node, fx.Node) and _flattens(node):
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _inputs(call: fx.Node) -> list[Any]:
    return [*call.args, *call.kwargs.values()]


def _same_rows(node: fx.Node) -> Iterator[fx.Node]:
    """``node``, and what it becomes by flattening."""
    yield node
    for user in node.users:
        if _flattens(user) and user.args[0] is node:
            yield from _same_rows(user)


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """All that uses the values of ``node``; flattening, and reading the shape, do not count."""
    for same in _same_rows(node):
        for user in same.users:
            if not _flattens(user) and not _reads_shape(user, same):
                yield user


def _flattens(node: fx.Node) -> bool:
    """Whether the node is ``flatten(0, 1)`` or the like, which keeps the last dimension.

    Of two dimensions it would leave one, for which a BatchNorm raises.
    """
    if node.target not in ("flatten", torch.flatten) or len(node.args) != 3 or node.kwargs:
        return False
    return tuple(node.args[1:]) in ((0, 1), (0, -2))


def _reads_shape(user: fx.Node, node: fx.Node) -> bool:
    if user.op == "call_function" and user.target is getattr:
        return user.args[1] in _OF_SHAPE
    if user.op == "call_method" and user.target in _SHAPE_OF_OTHER:
        return user.args[0] is not node
    return user.op == "call_method" and user.target in _SHAPE_METHODS


def _asks_geometry(user: fx.Node, module: fx.Node) -> bool:
    """Whether a function that was given a module reads no more of it than strides and the like."""
    if not isinstance(user.target, types.FunctionType) or user.kwargs:
        return False
    places = [i for i, argument in enumerate(user.args) if argument is module]
    return all(reads_only(user.target, place, _GEOMETRY) for place in places)


def _describe(node: fx.Node | None, calls: _Calls) -> str:
    if node is None:
        return "something that is no single value"
    if node.op == "call_module":
        module = calls.module_of[node]
        return f"{calls.name(module)} ({type(module).__name__})"
    if node.op == "placeholder":
        return f"the argument {node.target}"
    if node.op == "output":
        return "what forward returns"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "?")
    return f"{name}()"
