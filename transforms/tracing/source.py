"""Reads in source code what that code may do with a model's modules."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import inspect
import itertools
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import Logger, RootLogger
from typing import Any, NamedTuple

from torch import Tensor, fx, nn

from transforms.tracing.bytecode import names_called, nested_codes, stored_attributes
from transforms.tracing.conditions import Changing, Source, source_of
from transforms.tracing.modules import META_DATA

_HARMLESS = {"training", "__class__", "_get_name", "extra_repr", "forward", "__init__"}
"""Attributes of torch.nn.Module that give access to neither tensors nor children."""
_REACHING = {f"{named}{what}" for named in ("", "named_") for what in ("modules", "children")}
_REACHING |= {f"{named}{what}" for named in ("", "named_") for what in ("parameters", "buffers")}
_REACHING |= {"get_submodule", "get_parameter", "get_buffer", "state_dict"}
_REACHING |= {"_modules", "_parameters", "_buffers", "__dict__"}
"""Attributes that give access to tensors or children, on any object."""
_ASKS = ("isinstance", "type", "id", "len", "bool", "callable")
"""Builtins that do not look inside a module."""
_BY_NAME = ("hasattr", "getattr")
_PLAIN = frozenset({str, bytes, int, float, complex, bool, type(None), Logger, RootLogger})
"""Types of values that hold no modules. A logger leads to every other one of the process."""
_OPAQUE = (type, types.ModuleType, types.FrameType, Tensor, fx.Proxy)
"""Types of values that are not looked into. A traced value leads to the whole model."""


class Use(NamedTuple):
    """A use of a module by code."""

    module: nn.Module
    is_call: bool
    """Whether the code only calls the module, or the items of a ModuleList or ModuleDict."""


class Reader:
    """Finds the uses of a model's modules in code."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_name: dict[str, set[nn.Module]] = {}
        for module in model.modules():
            for name, child in module._modules.items():
                if child is not None:
                    self._by_name.setdefault(name, set()).add(child)
        self._methods: dict[str, set[nn.Module]] = {}
        for module in model.modules():
            for cls in type(module).__mro__:
                if not is_torchs(cls):
                    for name in vars(cls).keys() - {"forward"}:
                        self._methods.setdefault(name, set()).add(module)
        self._seen: set[tuple[types.FunctionType, nn.Module]] = set()

    def forward(self, module: nn.Module) -> Iterator[Use]:
        """The uses in the forward code of ``module``, none of which has run."""
        if "forward" in vars(module):
            yield Use(module, False)
        yield from self._method("forward", module)
        for name in ("__getattr__", "__getattribute__"):
            yield from self._method(name, module)

    def code(
        self,
        node: ast.AST,
        source: Source,
        modules: Mapping[str, Iterable[nn.Module]],
        namespace: Mapping[str, object],
    ) -> Iterator[Use]:
        """The uses in ``node``, a part of a function.

        ``modules`` may be in local variables, ``namespace`` has all other variables.
        """
        for each in ast.walk(node):
            match each:
                case ast.Attribute(attr=name):
                    yield from self._attribute(each, name, source, modules, namespace)
                case ast.Name(id=name) if name in modules:
                    is_stored = isinstance(each.ctx, ast.Store)
                    is_part = isinstance(source.parents.get(each), ast.Attribute)
                    if not (is_stored or is_part or _is_asked(each, source)):
                        for module in modules[name]:
                            yield Use(module, is_called(each, source))
                case ast.Name(id=name):
                    for module in modules_behind(namespace.get(name)):
                        yield Use(module, False)
                case ast.Constant(value=str(name)):
                    for module in itertools.chain(*modules.values()):
                        if (child := module._modules.get(name)) is not None:
                            yield Use(child, False)

    def _attribute(
        self,
        node: ast.Attribute,
        name: str,
        source: Source,
        modules: Mapping[str, Iterable[nn.Module]],
        namespace: Mapping[str, object],
    ) -> Iterator[Use]:
        owners = _owners(node.value, modules, namespace)
        if owners is None:
            if isinstance(node.value, ast.Call) and _is_name(node.value.func, ("super",)):
                for owner in modules.get((source.parameters or [""])[0], ()):
                    yield from self._method(name, owner, of_bases=True)
            children = self._by_name.get(name, set())
            reaches = name in _REACHING and (name.startswith("_") or is_called(node, source))
            reached = {self._model} if reaches else set()
            readers = set() if hasattr(Tensor, name) else self._methods.get(name, set())
        else:
            own = [owner._modules.get(name) for owner in owners]
            children = {child for child in own if child is not None}
            reaches = hasattr(nn.Module, name) and name not in _HARMLESS
            reached = set(owners) if reaches else set()
            readers = set(owners)
        for child in children:
            is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if not _is_asked(node, source):
                yield Use(child, (_items_are_called if is_list else is_called)(node, source))
        for module in reached:
            if not _reads_meta_data(node, source):
                yield Use(module, False)
        for module in readers:
            yield from self._method(name, module)
        for owner in owners or ():
            for module in modules_behind(vars(owner).get(name)):
                yield Use(module, False)
            if _gives_access(owner, name):
                yield Use(owner, False)

    def _method(self, name: str, module: nn.Module, of_bases: bool = False) -> Iterator[Use]:
        for cls in type(module).__mro__:
            if name in vars(cls):
                function = python_function(vars(cls)[name])
                if function is not None and not is_torchs(cls):
                    yield from self._function(function, module)
                if not of_bases:
                    return

    def _function(self, function: types.FunctionType, module: nn.Module) -> Iterator[Use]:
        if (function, module) in self._seen:
            return
        self._seen.add((function, module))
        source = source_of(function.__code__)
        if source is None:
            yield Use(module, False)
            return
        modules = {source.parameters[0]: [module]} if source.parameters else {}
        namespace = ChainMap(closure_of(function), function.__globals__)
        for node in source.tree.body:
            yield from self.code(node, source, modules, namespace)


def modules_in(value: object) -> Iterator[nn.Module]:
    """The modules in a value, also inside lists and dicts."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple | set | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from modules_in(item)


def modules_behind(*values: object) -> Iterator[nn.Module]:
    """The modules in values, also inside the attributes of other objects and in closures."""
    waiting, seen = [*values], set()
    while waiting:
        value = waiting.pop()
        if type(value) in _PLAIN or id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value
        elif isinstance(value, types.FunctionType):
            waiting += closure_of(value).values()
        elif isinstance(value, types.MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, functools.partial):
            waiting += [value.func, value.args, value.keywords]
        else:  # its attributes, also in slots; the items of a deque; a generator's variables
            waiting += gc.get_referents(value)


def closure_of(function: types.FunctionType) -> dict[str, object]:
    """The variables of enclosing functions that a function uses."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # an unassigned variable
            found[name] = cell.cell_contents
    return found


def modules_of_function(function: types.FunctionType) -> Iterator[nn.Module]:
    """The modules that a function can access without arguments: globals, closure, defaults."""
    named = [function.__globals__.get(name) for name in all_names(function.__code__)]
    yield from modules_behind(named, closure_of(function), function.__defaults__)


def reads_only(function: types.FunctionType, place: int, names: set[str]) -> bool:
    """Whether ``function`` only reads these attributes of the argument at ``place``."""
    parameters = [*inspect.signature(function).parameters.values()]
    if place >= len(parameters) or parameters[place].kind is inspect.Parameter.VAR_POSITIONAL:
        return False
    source = source_of(function.__code__)
    if source is None:
        return False
    users = (source.parents[node] for node in source.names.get(parameters[place].name, ()))
    return all(isinstance(user, ast.Attribute) and user.attr in names for user in users)


def dispatches(cls: type) -> bool:
    """Whether a method chooses its code by the type of an argument."""
    methods = (value for base in cls.__mro__ for value in vars(base).values())
    return any(isinstance(method, functools.singledispatchmethod) for method in methods)


def changing_attributes(classes: Iterable[type]) -> Changing:
    """The attributes that are properties of ``classes``, or that their forward code changes."""
    values, contents = set(), set()
    for cls in classes:
        own = [base for base in cls.__mro__ if not is_torchs(base)]
        values |= {
            name for base in own for name, v in vars(base).items() if isinstance(v, property)
        }
        for function in _reachable(cls):
            values |= stored_attributes(function.__code__)
            source = source_of(function.__code__)  # without one, all its conditions are open
            filled = source.filled if source is not None else ()
            contents |= {node.attr for node in filled if isinstance(node, ast.Attribute)}
    return Changing(frozenset(values), frozenset(contents))


def names_used(cls: type) -> set[str]:
    """The attributes and globals in ``forward`` and in what it calls, without torch's code."""

    def mentioned(function: types.FunctionType) -> Iterable[object]:
        return map(function.__globals__.get, all_names(function.__code__))

    functions = _functions(cls, mentioned, is_torchs)
    return {name for function in functions for name in all_names(function.__code__)}


def functions_called(cls: type) -> Iterator[tuple[object, types.CodeType]]:
    """What ``forward`` calls by a global name, such as ``F.dropout``, and the code that calls it.

    Also what it calls so indirectly, without the code of torch and of this library.
    """

    def called(function: types.FunctionType) -> Iterable[object]:
        return (each for each, _ in _calls(function))

    for function in _functions(cls, called, _is_known):
        yield from _calls(function)


def _functions(
    cls: type,
    leading_to: Callable[[types.FunctionType], Iterable[object]],
    is_left_out: Callable[[types.FunctionType], bool],
) -> Iterator[types.FunctionType]:
    """``forward``, the methods that it mentions, and the functions that these lead to."""
    waiting = _reachable(cls)
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        yield function
        for found in map(python_function, leading_to(function)):
            if found is not None and found not in seen and not is_left_out(found):
                seen.add(found)
                waiting.append(found)


def _calls(function: types.FunctionType) -> Iterator[tuple[object, types.CodeType]]:
    """What a function calls by a global name, and the code that calls it."""
    for code in nested_codes(function.__code__):
        for name, *attributes in names_called(code):
            called = function.__globals__.get(name)
            for attribute in attributes:
                is_module = isinstance(called, types.ModuleType)
                called = vars(called).get(attribute) if is_module else None
            if called is not None:
                yield called, code


def _reachable(cls: type) -> list[types.FunctionType]:
    """``forward`` and all methods whose names it or they mention, without torch's own."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not is_torchs(base):
            methods |= vars(base)
    found: dict[str, types.FunctionType] = {}
    names = ["forward"]
    while names:
        name = names.pop()
        function = python_function(methods.get(name))
        if function is not None and name not in found:
            found[name] = function
            names += all_names(function.__code__)
    return list(found.values())


def all_names(code: types.CodeType) -> set[str]:
    """The attributes and globals in code and its nested functions."""
    return {name for each in nested_codes(code) for name in each.co_names}


def python_function(attribute: object) -> types.FunctionType | None:
    """The Python function of a method, without decorators."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    if isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    if callable(attribute):
        attribute = inspect.unwrap(attribute)
    return attribute if isinstance(attribute, types.FunctionType) else None


def is_torchs(thing: type | Callable[..., Any]) -> bool:
    """Whether a class or function is torch's."""
    return (thing.__module__ or "").partition(".")[0] == "torch"


def _is_known(function: types.FunctionType) -> bool:
    """Whether a function is torch's or ours."""
    return is_torchs(function) or function.__module__.partition(".")[0] == "fusedoptim"


def _owners(
    value: ast.expr, modules: Mapping[str, Iterable[nn.Module]], namespace: Mapping[str, object]
) -> list[nn.Module] | None:
    """The modules that an expression may refer to; None if it may be anything."""
    if isinstance(value, ast.Name):
        if value.id in modules:
            return list(modules[value.id])
        is_other = value.id in namespace and not any(modules_behind(namespace[value.id]))
        return [] if is_other else None
    if not isinstance(value, ast.Attribute):
        return None
    owners = _owners(value.value, modules, namespace)
    if owners is None or not all(value.attr in vars(owner) for owner in owners):
        return None  # a child, a property, a method
    held = [vars(owner)[value.attr] for owner in owners]
    return None if any(modules_behind(held)) else []


def _gives_access(owner: nn.Module, name: str) -> bool:
    """Whether an attribute of a module of torch is its tensor, or code that may use its tensors."""
    is_other = name in _HARMLESS - {"forward"} or name in vars(owner) or name in owner._modules
    return is_torchs(type(owner)) and not is_other


def _is_asked(node: ast.AST, source: Source) -> bool:
    """Whether code only prints a module or tests it: for None, its class or attribute names."""
    parent = source.parents.get(node)
    if isinstance(parent, ast.Compare):
        return all(isinstance(operator, ast.Is | ast.IsNot) for operator in parent.ops)
    if isinstance(parent, ast.FormattedValue):
        return isinstance(source.statement(parent), ast.Raise)  # the text of an error
    if not isinstance(parent, ast.Call) or parent.func is node:
        return False
    if _is_name(parent.func, _BY_NAME):  # the name is a constant, which is examined separately
        return len(parent.args) > 1 and isinstance(parent.args[1], ast.Constant)
    return _is_name(parent.func, _ASKS)


def is_called(node: ast.AST, source: Source) -> bool:
    """Whether a part of a function is what a call in it calls."""
    parent = source.parents.get(node)
    return isinstance(parent, ast.Call) and parent.func is node


def _items_are_called(node: ast.Attribute, source: Source) -> bool:
    """Whether a list of modules is only indexed and iterated over, and its items only called."""
    used: ast.AST = node
    user = source.parents[node]
    if isinstance(user, ast.Call) and _is_name(user.func, ("len",)):
        return True
    if isinstance(user, ast.Subscript) and not isinstance(user.slice, ast.Slice):
        return user.value is node and is_called(user, source)
    if isinstance(user, ast.Call) and _is_name(user.func, ("enumerate", "zip")):
        used, user = user, source.parents[user]
    if not (isinstance(user, ast.For | ast.comprehension) and user.iter is used):
        return False
    targets = {n.id for n in ast.walk(user.target) if isinstance(n, ast.Name)}
    return all(
        is_called(use, source) or _is_index(use, source)
        for use in ast.walk(source.tree)
        if isinstance(use, ast.Name) and use.id in targets and isinstance(use.ctx, ast.Load)
    )


def _is_index(use: ast.AST, source: Source) -> bool:
    """Whether a name is used as an index or a number, as in ``i < n`` or ``x[i]``."""
    parent = source.parents.get(use)
    if isinstance(parent, ast.Subscript):
        return parent.slice is use
    return isinstance(parent, ast.Compare)


def _reads_meta_data(node: ast.Attribute, source: Source) -> bool:
    """Whether only dtype, device and similar attributes of ``x.parameters()`` are read.

    As in ``next(x.parameters()).device`` and ``(p.dtype for p in x.parameters())``.
    """
    call = source.parents.get(node)
    user = source.parents.get(call) if isinstance(call, ast.Call) else None
    if node.attr not in ("parameters", "buffers") or user is None:
        return False
    if isinstance(user, ast.Call) and _is_name(user.func, ("next",)):
        return _asks_tensor(user, source)
    if not (isinstance(user, ast.comprehension) and isinstance(user.target, ast.Name)):
        return False
    return all(
        _asks_tensor(use, source)
        for use in ast.walk(source.parents[user])
        if isinstance(use, ast.Name) and use.id == user.target.id and use is not user.target
    )


def _asks_tensor(node: ast.AST, source: Source) -> bool:
    parent = source.parents.get(node)
    return isinstance(parent, ast.Attribute) and parent.attr in META_DATA


def _is_name(node: ast.AST, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Name) and node.id in names
