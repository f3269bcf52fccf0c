"""Finds checks in code, such as ``isinstance``, whose result may change when a layer is rewritten.

Code that no trace ran shows what it checks, but seldom which layer: a variable may hold anything.
So a check counts for each layer for which its result would change.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import sys
import types
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from torch import nn

from transforms.tracing.bytecode import nested_codes
from transforms.tracing.conditions import Source, source_of
from transforms.tracing.disguises import Disguise, Stranger
from transforms.tracing.source import all_names, closure_of, is_called

_TEXTS = {"__module__", "__repr__", "_get_name", "extra_repr"}
"""Attributes that tell the class."""
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}
_TELLING = {"print", "warn", "warning", "warning_once", "info", "debug", "error", "log", "_assert"}
"""Functions that write texts for people."""


class Question(NamedTuple):
    """A question that code asks about something, which may be a layer."""

    about: Literal["base", "class", "attribute"]
    expected: tuple[type, ...] | str | None
    """The classes, or the name of the attribute, that code asks for; None if not known."""

    def concerns(self, layer: nn.Module, disguise: Disguise) -> bool:
        """Whether the layer may give another answer when it is rewritten."""
        match self.about, self.expected:
            case "base", None:
                return disguise.is_unrelated
            case "base", tuple(kinds):
                return disguise.is_unrelated and _is_told_apart(layer, kinds)
            case "class", tuple(kinds):
                return type(layer) in kinds
            case "attribute", str(name) if not disguise.is_unrelated:
                return name == "bias" and disguise.gets_bias and getattr(layer, name, 0) is None
            case "attribute", str(name):
                return hasattr(layer, name) and not (name in vars(layer) or hasattr(Stranger, name))
        return True


def _is_told_apart(layer: nn.Module, kinds: tuple[type, ...]) -> bool:
    """Whether ``isinstance`` distinguishes the layer from a module of an unrelated class."""
    try:
        return isinstance(layer, kinds) != issubclass(Stranger, kinds)
    except Exception:  # of any class, as a metaclass may answer
        return True


def questions_of(function: types.FunctionType) -> Iterator[Question]:
    """The questions in a function."""
    source = source_of(function.__code__)
    if source is None:
        yield from questions_in_bytecode(function.__code__)
        return
    namespace = ChainMap(closure_of(function), function.__globals__)
    for node in source.tree.body:
        yield from questions_in(node, source, namespace)


def names_in(node: ast.AST) -> set[str]:
    """The variables and attributes in a part of a function."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return found | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def questions_in(
    node: ast.AST, source: Source, namespace: Mapping[str, object]
) -> Iterator[Question]:
    """The questions in a part of a function, except in texts for people.

    Args:
        node: the part.
        source: the function.
        namespace: global variables, and those of enclosing functions.
    """
    for each in ast.walk(node):
        if isinstance(each, ast.expr | ast.pattern) and not _is_told(each, source):
            yield from _questions(each, source, namespace)


def _questions(
    node: ast.AST, source: Source, namespace: Mapping[str, object]
) -> Iterator[Question]:
    match node:
        case ast.Call(func=ast.Name(id="isinstance"), args=[_, kind]) | ast.MatchClass(cls=kind):
            yield Question("base", _classes(kind, source, namespace))
        case ast.Call(func=ast.Name(id="type"), args=[about]) if not _is_self(about, source):
            yield Question("class", _compared(node, source, namespace))
        case ast.Attribute(value=about, attr="__class__") if not _is_self(about, source):
            yield Question("class", _compared(node, source, namespace))
        case ast.Call(func=ast.Name(id="hasattr" | "getattr"), args=[about, name, *_]):
            text = name.value if isinstance(name, ast.Constant) else None
            if isinstance(text, str):
                yield Question("attribute", text)
            elif not _is_self(about, source):
                yield Question("attribute", None)
        case ast.Call(func=ast.Name(id="vars" | "dir" | "repr"), args=[about]):
            if not _is_self(about, source):
                yield Question("class", None)
        case ast.Attribute(attr=name) if name in _TEXTS:
            yield Question("class", None)
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in _STATISTICS | {"bias"}:
            yield Question("attribute", name)
        case ast.Name(id="isinstance" | "issubclass") if not is_called(node, source):
            yield Question("base", None)
        case ast.Name(id="type" | "hasattr" | "getattr" | "vars" | "dir" | "repr"):
            if not is_called(node, source):
                yield Question("class", None)
        case ast.Name(id=name) if (kinds := _dispatched(namespace.get(name))) is not None:
            yield Question("base", kinds)


def questions_in_bytecode(code: types.CodeType) -> Iterator[Question]:
    """The questions in code without a source."""
    names = all_names(code)
    if names & {"isinstance", "issubclass"} or "MATCH_CLASS" in _operations(code):
        yield Question("base", None)
    if names & {"type", "__class__", "vars", "dir", "repr", *_TEXTS}:
        yield Question("class", None)
    if names & {"hasattr", "getattr"}:
        yield Question("attribute", None)
    for name in names & {"bias", *_STATISTICS}:
        yield Question("attribute", name)


def _operations(code: types.CodeType) -> set[str]:
    return {each.opname for part in nested_codes(code) for each in dis.get_instructions(part)}


def _is_told(node: ast.AST, source: Source) -> bool:
    """Whether code only writes it into the text of an error, of a warning or of a log."""
    while not isinstance(node, ast.stmt) and node in source.parents:
        node = source.parents[node]
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in _TELLING:
                return True
    return isinstance(node, ast.Raise | ast.Assert)


def _is_self(node: ast.expr, source: Source) -> bool:
    """Whether it is the object whose method the function is: a module of the user's class."""
    parameters = source.parameters
    is_method = bool(parameters) and parameters[0] in ("self", "cls")
    return is_method and isinstance(node, ast.Name) and node.id == parameters[0]


def _compared(
    node: ast.AST, source: Source, namespace: Mapping[str, object]
) -> tuple[type, ...] | None:
    """The classes with which a class is compared, if nothing else is done with it."""
    parent = source.parents.get(node)
    if not isinstance(parent, ast.Compare) or len(parent.comparators) != 1:
        return None
    other = parent.comparators[0] if parent.left is node else parent.left
    return _classes(other, source, namespace)


def _classes(
    node: ast.expr, source: Source, namespace: Mapping[str, object]
) -> tuple[type, ...] | None:
    """The classes that an expression names; None if they are not known."""
    match node:
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            found = [_classes(part, source, namespace) for part in parts]
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            found = [_classes(part, source, namespace) for part in (left, right)]
        case ast.Constant(value=None):
            return (type(None),)
        case _:
            return _as_classes(_value(node, source, namespace))
    return None if None in found else tuple(kind for kinds in found for kind in kinds or ())


def _as_classes(value: Any) -> tuple[type, ...] | None:
    if isinstance(value, types.UnionType):
        value = value.__args__
    if isinstance(value, type):
        return (value,)
    is_tuple = isinstance(value, tuple) and all(isinstance(each, type) for each in value)
    return value if is_tuple else None


def _value(node: ast.expr, source: Source, namespace: Mapping[str, object]) -> object:
    """The value of a global variable, or of an attribute of a Python module; None otherwise."""
    match node:
        case ast.Name(id=name) if name in (imported := _imported(source)):
            return imported[name]
        case ast.Name(id=name) if name not in source.bindings and name not in source.all_parameters:
            return namespace.get(name, getattr(builtins, name, None))
        case (
            ast.Attribute(value=value, attr=name)
            | ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name))])
        ):
            owner = _value(value, source, namespace)
            if owner is _Absent:
                return _Absent
            is_module = isinstance(owner, types.ModuleType)
            return inspect.getattr_static(owner, name, None) if is_module else None
    return None


class _Absent:
    """Stands for classes of Python modules that are not imported: they have no objects."""


def _imported(source: Source) -> dict[str, object]:
    """What the function's own import statements assign to variables."""
    found: dict[str, object] = {}
    for node in source.imports:
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = sys.modules.get(name, _Absent)
        elif node.level == 0:
            module = sys.modules.get(node.module or "")
            for alias in node.names:
                value = _Absent if module is None else getattr(module, alias.name, None)
                found[alias.asname or alias.name] = value
    return found


def _dispatched(value: object) -> tuple[type, ...] | None:
    """The classes for which a function of ``functools.singledispatch`` has code of its own."""
    registry = getattr(value, "registry", None) if isinstance(value, types.FunctionType) else None
    return tuple(set(registry) - {object}) if isinstance(registry, Mapping) else None
