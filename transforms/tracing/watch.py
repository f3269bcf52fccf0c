"""Records what torch.fx does not record: lines that ran, open conditions, tensors that were read.

While a model is traced, :class:`Watch` follows the lines of all code outside torch and the standard
library, and :class:`TensorReads` sees the torch functions that get the model's tensors.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import importlib
import os
import sys
import sysconfig
import types
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree

from fusedoptim._torch_private import count_function_modes, function_mode_at, pop_function_mode
from transforms.tracing.conditions import Changing, Conditions, Source, source_of
from transforms.tracing.modules import META_DATA, own_tensors
from transforms.tracing.source import Reader, Use, modules_behind, modules_in

_TRUSTED = tuple(
    os.path.realpath(folder) + os.sep
    for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
)
_importing: Any = importlib._bootstrap  # has no annotations
_IMPORT = _importing._find_and_load.__code__
"""The code that runs for each import of a module that was not imported before."""
_STANDARD = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep


Originals = Mapping[nn.Module, nn.Module]
"""The model's modules, by their traced copies."""


class TensorReads(TorchFunctionMode):
    """Notes which of the ``modules`` have tensors that torch functions read."""

    def __init__(self, modules: Iterator[nn.Module]) -> None:
        super().__init__()
        self.of: set[nn.Module] = set()
        """The modules whose tensors were read."""
        self._owners: dict[int, set[nn.Module]] = {}
        for module in modules:
            for _, tensor in own_tensors(module):
                self._owners.setdefault(_memory(tensor), set()).add(module)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not _is_meta_data(func):
            tensors = [t for t in _pytree.tree_leaves((args, kwargs)) if _is_tensor(t)]
            owners = [self._owners.get(_memory(t), set()) for t in tensors]
            if any(owners) and _writes(func, kwargs):
                raise RuntimeError(f"forward writes to the model's tensors ({resolve_name(func)})")
            self.of.update(*owners)
        return func(*args, **kwargs)

    def end(self) -> None:
        """Leave torch's stack of modes, if ``__exit__`` was interrupted before it did so."""
        depth = count_function_modes()
        if depth and function_mode_at(depth - 1) is self:
            pop_function_mode()


def _is_tensor(value: object) -> bool:
    return issubclass(type(value), Tensor)  # isinstance() is true of a proxy too


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):  # sparse, or a tensor that wraps others
        return id(tensor)


def _is_meta_data(func: Any) -> bool:
    name = resolve_name(func) or getattr(func, "__name__", "")
    return name.removeprefix("torch.").removeprefix("Tensor.").removesuffix(".__get__") in META_DATA


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    name: str = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_operator = name in ("__setitem__", "__set__") or (
        name.startswith("__i") and name != "__invert__"
    )
    return is_in_place or is_operator or kwargs.get("out") is not None


class _Function:
    """A function outside torch, called with one module as its first argument."""

    def __init__(self, frame: types.FrameType, changing: Changing) -> None:
        code, variables = frame.f_code, frame.f_locals
        self.source: Source | None = source_of(code)
        self.code = code
        enclosed = {name: variables[name] for name in code.co_freevars if name in variables}
        self.held: dict[str, set[nn.Module]] = {}
        """The modules behind other values of local variables, such as a partial or a method."""
        self.namespace: Mapping[str, Any] = ChainMap(self.held, enclosed, frame.f_globals)
        self.modules: dict[str, set[nn.Module]] = {}
        """The modules that local variables have held, by variable."""
        self.ran: set[int] = set()
        self._changing = changing

    @functools.cached_property
    def conditions(self) -> Conditions | None:
        """Its conditions; None if there is no source."""
        if self.source is None:
            return None
        names = {*self.source.parameters} & self.modules.keys()
        return Conditions(self.source, names, self._changing, self.namespace)

    def meet(self, variables: Mapping[str, object], originals: Originals) -> None:
        """Note the modules in local variables."""
        for name, value in variables.items():
            if modules := {originals.get(module, module) for module in modules_in(value)}:
                self.modules.setdefault(name, set()).update(modules)

    def look_behind(self, variables: Mapping[str, object], originals: Originals) -> None:
        """Note the modules behind other values of local variables."""
        for name, value in variables.items():
            behind = set(modules_behind(value))
            if not behind.issubset(modules_in(value)):
                self.held.setdefault(name, set()).update(originals.get(m, m) for m in behind)

    def covers(self, inner: types.CodeType) -> bool:
        """Whether the code of an inner function is part of this one."""
        if self.source is None or self.code.co_filename != inner.co_filename:
            return False
        return self.source.covers(inner.co_firstlineno)

    def is_open(self, line: int) -> bool:
        """Whether an open condition is evaluated on a line."""
        return self.conditions is None or line in self.conditions.lines


class Unread(NamedTuple):
    """Code that did not run."""

    code: ast.AST | types.CodeType
    """A part of a function; the whole one if it has no source."""
    source: Source | None
    namespace: Mapping[str, Any]
    """The variables of the function that are not its own."""


class Watch:
    """Follows the code that runs while a module is traced; a context manager.

    ``changing`` are attributes of modules that may differ in another call.
    """

    def __init__(self, changing: Changing, originals: Originals) -> None:
        self._changing = changing
        self._originals = originals
        self._functions: dict[_Key, _Function] = {}
        self.undecided: set[fx.Node] = set()
        """Values that a function held when it evaluated an open condition."""
        self.entered: set[nn.Module] = set()
        """The modules whose forward ran."""
        self._import: types.FrameType | None = None
        """The import that runs: nothing is followed while it does."""
        self._error: BaseException | None = None
        """What following the code raised, as an interrupt does: CPython may crash if a trace
        function raises."""

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)

    def __exit__(self, *_: object) -> None:
        self.end()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Follow no more code; called again if ``__exit__`` was interrupted before it did so."""
        sys.settrace(self._before)

    def uses(self, model: nn.Module) -> Iterator[Use]:
        """What code that did not run may do with modules of ``model``."""
        reader = Reader(model)
        for function in list(self._functions.values()):
            if function.source is None or function.conditions is None:  # nothing is known
                for module in set().union(*function.modules.values(), *function.held.values()):
                    yield Use(module, False)
                continue
            modules = {n: m for n, m in function.modules.items() if n not in function.held}
            for node in function.conditions.not_run(function.ran):
                yield from reader.code(node, function.source, modules, function.namespace)

    def lines(self) -> dict[_Key, frozenset[int]]:
        """The lines that ran, by function; only of functions that had modules in variables.

        Others may be no part of the model's code, such as callbacks of the garbage collector.
        """
        return {key: frozenset(f.ran) for key, f in self._functions.items() if f.modules}

    def not_run(self) -> Iterator[Unread]:
        """The code that did not run, but may run in another call, where modules are in use."""
        for function in list(self._functions.values()):
            if not (function.modules or function.held):
                continue
            if function.source is None or function.conditions is None:
                if _has_conditions(function.code):
                    yield Unread(function.code, None, function.namespace)
                continue
            for node in function.conditions.not_run(function.ran):
                yield Unread(node, function.source, function.namespace)

    def _on_call(self, frame: types.FrameType, event: str, _: object) -> Any:
        try:
            return self._begin(frame)
        except BaseException as error:  # raised at the end
            self._error = error
            return None

    def _begin(self, frame: types.FrameType) -> Any:
        """The function to call before each line of a frame, if any."""
        code = frame.f_code
        if self._import is not None:
            return None
        if code is _IMPORT:
            # Python calls no trace function while this method runs. What is imported later, as by a
            # lazy import of torch, would take twenty times as long. The import itself then finds
            # it, or fails again.
            with contextlib.suppress(Exception):
                importlib.import_module(frame.f_locals["name"])
            self._import = frame
            return self._on_import
        if not _is_users(code.co_filename):
            return None
        function = self._enclosing(frame) or self._functions.setdefault(
            self._key(frame), _Function(frame, self._changing)
        )
        if code.co_name == "forward":
            self.entered.update(self._methods_owner(frame))
        if function.source is None and not _has_conditions(code):
            return None
        function.meet(frame.f_locals, self._originals)
        function.ran.add(frame.f_lineno)
        return functools.partial(self._on_line, function)

    def _on_import(self, frame: types.FrameType, event: str, _: object) -> Any:
        if event == "return":  # also after an exception
            self._import = None
        return self._on_import

    def _key(self, frame: types.FrameType) -> _Key:
        code = frame.f_code
        module = next(iter(self._methods_owner(frame)), None)
        return code.co_filename, code.co_firstlineno, id(module)

    def _methods_owner(self, frame: types.FrameType) -> list[nn.Module]:
        """The module that is the function's first argument, if it is one."""
        names = frame.f_code.co_varnames
        first = frame.f_locals.get(names[0]) if names else None
        return [self._originals.get(first, first)] if _is_module(first) else []

    def _enclosing(self, frame: types.FrameType) -> _Function | None:
        """The function that contains a lambda or a comprehension, if that function was called."""
        code = frame.f_code
        if not code.co_name.startswith("<"):
            return None
        callers = [self._functions.get(self._key(frame.f_back))] if frame.f_back else []
        for function in (*callers, *self._functions.values()):
            if function is not None and function.covers(code):
                return function
        return None

    def _on_line(
        self, function: _Function, frame: types.FrameType, event: str, _: object
    ) -> Callable[..., Any] | None:
        try:
            self._follow(function, frame, event)
        except BaseException as error:  # raised at the end
            self._error = error
            return None
        return functools.partial(self._on_line, function)

    def _follow(self, function: _Function, frame: types.FrameType, event: str) -> None:
        # Also before each line: a loop gives its variable another module, and from CPython 3.12 on
        # the variables of a comprehension are gone when it ends.
        function.meet(frame.f_locals, self._originals)
        if event == "line":
            function.ran.add(frame.f_lineno)
            if function.is_open(frame.f_lineno):
                function.look_behind(frame.f_locals, self._originals)
                self.undecided.update(_nodes(list(frame.f_locals.values())))


@functools.lru_cache(maxsize=1024)
def _is_users(filename: str) -> bool:
    path = os.path.realpath(filename)
    is_standard = path.startswith(_STANDARD) and "-packages" not in path
    # Other names in brackets are those of users' code without a file, such as <stdin>.
    is_frozen = filename.startswith("<frozen")
    return not (path.startswith(_TRUSTED) or is_standard or is_frozen)


_Key = tuple[str, int, int]
"""A function's file and line, and the id of the module whose method it is."""


def _is_module(value: object) -> TypeGuard[nn.Module]:
    return issubclass(type(value), nn.Module)


@functools.lru_cache(maxsize=1024)
def _has_conditions(code: types.CodeType) -> bool:
    names = (instruction.opname for instruction in dis.get_instructions(code))
    return any("JUMP" in name and "_IF_" in name for name in names)


def _nodes(value: Any) -> Iterator[fx.Node]:
    """The traced values in a value."""
    if issubclass(type(value), fx.Proxy):
        yield value.node
    elif type(value) in (list, tuple, set, dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nodes(item)
