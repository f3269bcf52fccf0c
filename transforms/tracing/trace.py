"""One trace of a module's forward code by ``torch.fx``, with facts that its graph lacks."""

from __future__ import annotations

import abc
import contextlib
import dis
import functools
import inspect
import random
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree

from fusedoptim._locks import new_lock
from transforms.rewrites.exchanged_class import own_class
from transforms.tracing.clones import clone
from transforms.tracing.conditions import Changing
from transforms.tracing.disguises import Disguise
from transforms.tracing.modules import META_DATA, own_tensors
from transforms.tracing.source import reads_only
from transforms.tracing.watch import TensorReads, Watch

_GEOMETRY = {"stride", "kernel_size", "dilation", "padding", "groups"}
_GEOMETRY |= {"in_channels", "out_channels", "in_features", "out_features", "training"}
_SHAPE_OF_OTHER = {"reshape_as", "view_as", "expand_as"}
_one_at_a_time = new_lock()  # torch.fx replaces methods of nn.Module while it traces


class _Proxy(fx.Proxy):
    """A traced value that passes for a tensor where Python code asks, as by ``isinstance``."""

    _is_param = _is_buffer = False  # read by isinstance(..., Parameter) and Buffer

    @property  # type: ignore[misc]  # an object's is no property
    def __class__(self) -> type:
        # C++ asks too, and would read the memory of this object as that of a tensor.
        return Tensor if _asks_for_class(sys._getframe(1)) else _Proxy

    def __setattr__(self, name: str, value: object) -> None:
        if hasattr(Tensor, name):  # such as weight.data = ...
            raise RuntimeError(f"forward sets {name} of a tensor, which a trace does not record")
        super().__setattr__(name, value)


def _asks_for_class(frame: types.FrameType) -> bool:
    """Whether a function is asking for the class of an object, not calling C++ that asks."""
    return frame.f_code is _ABC_CHECK or frame.f_lasti in _questions(frame.f_code)


_ABC_CHECK = abc.ABCMeta.__instancecheck__.__code__


@functools.lru_cache(maxsize=1024)
def _questions(code: types.CodeType) -> frozenset[int]:
    """The offsets of calls of ``isinstance``, reads of ``__class__`` and class patterns."""
    instructions = list(dis.get_instructions(code))
    starts = {_start(i) for i in instructions if i.argval == "isinstance"}
    return frozenset(
        i.offset
        for i in instructions
        if i.opname == "MATCH_CLASS"
        or i.argval == "__class__"
        or (i.opname in _CALLS and i.arg == 2 and _start(i) in starts)
    )


_CALLS = {"CALL_FUNCTION", "PRECALL", "CALL"}
"""What runs ``isinstance``: the first in CPython 3.10, the second in 3.11."""


def _start(instruction: dis.Instruction) -> tuple[int | None, int | None]:
    """Where the expression begins: its line, and its column except under PYTHONNODEBUGRANGES."""
    place = getattr(instruction, "positions", None)  # from Python 3.11 on
    return (None, None) if place is None else (place.lineno, place.col_offset)


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self, is_leaf: Callable[[nn.Module], bool], functions: set[types.FunctionType]
    ) -> None:
        super().__init__(autowrap_functions=tuple(functions))
        self._is_leaf = is_leaf
        self.culprit: nn.Module | None = None
        """The innermost module whose own code cannot be traced."""
        self._made: list[tuple[fx.Node, weakref.ref[_Proxy]]] = []
        self._tensors: dict[nn.Module, list[int]] = {}
        self.exchanged: set[nn.Module] = set()
        """Modules that were called with tensors other than their own."""
        self._thread: int | None = threading.get_ident()
        """The thread that traces; None once the trace has ended."""

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        self._tensors = {m: _identities(m) for m in root.modules()}
        try:
            return super().trace(root, concrete_args)
        finally:
            # If torch traces in another thread at the same time, as torch.compile does, the end of
            # that trace installs this tracer's methods of nn.Module again, permanently. They must
            # do nothing from now on.
            self._thread = None
            self._tensors.clear()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        proxy = _Proxy(node, self)
        self._made.append((node, weakref.ref(proxy)))
        return proxy

    def kept(self) -> set[fx.Node]:
        """Values that a module, a list or another object still holds."""
        return {node for node, proxy in self._made if proxy() is not None}

    def create_arg(self, a: Any) -> Any:
        if type(a) is _Proxy:  # before an isinstance check, which it would pass
            return a.node
        return super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if self._is_leaf(m) or super().is_leaf_module(m, module_qualified_name):
            return True
        return own_class(m).__module__.startswith("torch.nn") and own_class(m) is not type(m)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Another thread's call is part of the trace only if it got a traced value from here.
        is_over = self._thread is None
        if is_over or (threading.get_ident() != self._thread and not _has_proxies((args, kwargs))):
            return forward(*args, **kwargs)
        if _identities(m) != self._tensors.get(m):
            self.exchanged.add(m)
        self.path_of_module(m)  # raises, in the caller, for a module that is not registered
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if not self.is_leaf_module(m, ""):
                self.culprit = self.culprit or m
            raise


def _has_proxies(value: object) -> bool:
    return any(type(leaf) is _Proxy for leaf in _pytree.tree_leaves(value))


def _identities(module: nn.Module) -> list[int]:
    return [id(tensor) for _, tensor in own_tensors(module)]


class Trace(NamedTuple):
    """The graph of one trace, and what else it found out."""

    graph: fx.Graph
    modules: dict[str, nn.Module]
    """The modules that are called, by their names in the graph."""
    made: dict[fx.Node, Tensor]
    """The tensors that forward makes from no argument."""
    kept: set[fx.Node]
    """Values that forward stores where other code may read them."""
    read: set[nn.Module]
    """Modules whose tensors are read or replaced."""
    watch: Watch


class UntraceableError(Exception):
    """A forward that torch.fx cannot trace, with the module whose code is to blame."""

    def __init__(self, culprit: nn.Module, function: types.FunctionType | None) -> None:
        self.culprit = culprit
        self.function = function
        """The function called by its forward that cannot be traced, if there is one."""


def _function_to_blame(error: BaseException, culprit: nn.Module) -> types.FunctionType | None:
    """The global function that ``culprit.forward`` was calling when it failed."""
    forward = inspect.unwrap(type(culprit).forward)
    stack = traceback.walk_tb(error.__traceback__)
    codes = [frame.f_code for frame, _ in stack]
    if not isinstance(forward, types.FunctionType) or forward.__code__ not in codes[:-1]:
        return None
    below = codes[len(codes) - codes[::-1].index(forward.__code__) :]
    called = forward.__globals__.get(below[0].co_name) if below else None
    is_it = isinstance(called, types.FunctionType) and called.__code__ is below[0]
    return called if is_it else None


def run_trace(
    root: nn.Module,
    is_leaf: Callable[[nn.Module], bool],
    functions: set[types.FunctionType],
    changing: Changing,
    disguises: Mapping[nn.Module, Disguise],
) -> Trace:
    """Trace ``root`` on a copy that shares its tensors, as forward may write to its attributes.

    Optional arguments have their defaults, as a traced argument is never None. Modules for which
    ``is_leaf`` is true, and ``functions``, are not entered: only their calls are traced.
    ``disguises`` are for some of these modules. The random state of torch and Python stays.

    Raises:
        UntraceableError: forward cannot be traced.
    """
    try:
        twin, originals = clone(root)
        for copied, module in originals.items():
            if module in disguises:
                disguises[module].put_on(copied)
    except Exception as error:  # of any class: the model's own
        raise UntraceableError(root, None) from error
    tracer = _Tracer(lambda m: is_leaf(originals[m]), functions)
    reads, watch = TensorReads(twin.modules()), Watch(changing, originals)
    try:
        with _one_at_a_time, _same_random_state(), watch, reads:
            graph = tracer.trace(twin, concrete_args=_defaults(root) or None)
    except (Exception, SystemExit) as error:  # of any class: the model's own
        culprit = originals.get(tracer.culprit or twin, root)
        raise UntraceableError(culprit, _function_to_blame(error, culprit)) from error
    finally:  # an interrupt may come before the first line of an __exit__
        reads.end()
        watch.end()
    named = dict(twin.named_modules(remove_duplicate=False))
    modules: dict[str, nn.Module] = {}
    made: dict[fx.Node, Tensor] = {}
    read = {originals[module] for module in reads.of | tracer.exchanged}
    for node in graph.nodes:
        if node.op == "call_module":
            modules[node.target] = originals[named[node.target]]
        elif node.op == "get_attr" and node.target in named:
            if not all(asks_geometry(user, node) for user in node.users):
                read.update(originals[named[node.target]].modules())
        elif node.op == "get_attr" and node.target.startswith("_tensor_constant"):
            made[node] = getattr(twin, node.target)
        elif node.op == "get_attr" and (
            node in watch.undecided or not all(reads_shape(user, node) for user in node.users)
        ):
            read.add(originals[named[node.target.rpartition(".")[0]]])
    return Trace(graph, modules, made, tracer.kept(), read, watch)


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """Put back the random numbers that forward draws while it is traced."""
    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)


def _defaults(root: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(type(root).forward).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def reads_shape(user: fx.Node, node: fx.Node) -> bool:
    """Whether ``user`` reads only the shape, dtype or device of the value of ``node``."""
    if user.op == "call_function" and user.target is getattr:
        return user.args[1] in META_DATA
    if user.op == "call_method" and user.target in _SHAPE_OF_OTHER:
        return user.args[0] is not node
    return user.op == "call_method" and user.target in META_DATA


def asks_geometry(user: fx.Node, module: fx.Node) -> bool:
    """Whether a function that gets a module reads only strides and similar attributes of it."""
    if not isinstance(user.target, types.FunctionType) or user.kwargs:
        return False
    places = [i for i, argument in enumerate(user.args) if argument is module]
    uses = sum(leaf is module for leaf in _pytree.tree_leaves(user.args))
    if uses > len(places):  # within a list or dict, from which the function may take it
        return False
    return all(reads_only(user.target, place, _GEOMETRY) for place in places)
