"""Finds, in source code, questions about what a module is: of which class, with what attributes."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from torch import nn

from transforms.tracing.conditions import Source
from transforms.tracing.modules import modules_in

ASKING = frozenset({"isinstance", "type", "hasattr", "getattr", "__class__"})
"""Names in code that asks."""
_BELOW = {f"{named}{what}" for named in ("", "named_") for what in ("modules", "children")}
_BELOW |= {"get_submodule"}
"""Methods that return modules inside a module."""
_ITEMS = {"values", "items", "get", "pop", "__getitem__"}
"""Methods that return items of a container."""
_PASSING = {"enumerate", "zip", "iter", "next", "list", "tuple", "reversed", "sorted", "filter"}
"""Builtins that return what they are given, or its items."""
_BLIND = {"len", "id", "bool", "callable", "range", "super"}
"""Builtins that do not ask, apart from those in ``_PASSING``."""


class Question(NamedTuple):
    """A question that code may ask about a module."""

    module: nn.Module
    how: Literal["isinstance", "question"]
    """``isinstance`` has the same answer for a class that derives from the module's."""


class Questions:
    """The questions in a function's code.

    Args:
        source: the function.
        modules: what local variables may hold. Other variables may hold what the code assigns.
        namespace: global variables, and those of enclosing functions.
        by_name: the children of a model's modules, by name: what an argument's attribute may be.
    """

    def __init__(
        self,
        source: Source,
        modules: Mapping[str, Iterable[nn.Module]],
        namespace: Mapping[str, object],
        by_name: Mapping[str, set[nn.Module]],
    ) -> None:
        self._source = source
        self._modules = modules
        self._namespace = namespace
        self._by_name = by_name
        self._entered: set[str] = set()

    def of(self, node: ast.AST) -> Iterator[Question]:
        """The questions in one node of the code, without its parts."""
        match node:
            case ast.Call(func=ast.Name(id="isinstance"), args=[about, *_]):
                for module in self._about(about):
                    yield Question(module, "isinstance")
                return
            case ast.Call(func=ast.Name(id=name), args=[about, *_]) if name in ASKING:
                asked = self._about(about)
            case ast.Attribute(value=about, attr="__class__") | ast.Match(subject=about):
                asked = self._about(about)
            case ast.Call(func=function, args=args, keywords=keywords) if self._may_ask(function):
                asked = self._union([*args, *(keyword.value for keyword in keywords)])
            case _:
                return
        for module in asked:
            yield Question(module, "question")

    def _may_ask(self, function: ast.expr) -> bool:
        """Whether a function that is called may ask its arguments what they are."""
        if isinstance(function, ast.Name) and function.id in _PASSING | _BLIND:
            return False
        found = self._global(function)
        return (getattr(found, "__module__", None) or "").partition(".")[0] != "torch"

    def _global(self, node: ast.expr) -> object:
        """The value of a global variable, or of an attribute of a Python module; None otherwise."""
        match node:
            case ast.Name(id=name) if name not in self._source.bindings:
                return self._namespace.get(name)
            case ast.Attribute(value=value, attr=name):
                owner = self._global(value)
                is_module = isinstance(owner, types.ModuleType)
                return inspect.getattr_static(owner, name, None) if is_module else None
        return None

    def _about(self, node: ast.expr) -> set[nn.Module]:
        """The modules that a question may be about."""
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if self._is_unknown(owner):
                return _with_items(self._by_name.get(name, ()))
        return self._values(node)

    def _is_unknown(self, name: str) -> bool:
        return name in self._source.parameters and name not in self._modules

    def _values(self, node: ast.expr) -> set[nn.Module]:
        """The modules that an expression may be, or contain in a list of modules."""
        match node:
            case ast.Name(id=name):
                return self._variable(name)
            case ast.Attribute(value=value, attr=name):
                return self._attribute(value, name)
            case ast.Subscript(value=ast.Attribute(value=value, attr=name), slice=index):
                return self._item(value, name, index)
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self._values(value)
            case ast.NamedExpr(value=value):
                return self._values(value)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, *_]):
                return {child for each in self._values(owner) for child in each.children()}
            case ast.Call(func=ast.Name(id=name), args=args) if name in _PASSING:
                return self._union(args)
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _BELOW:
                return {inner for each in self._values(value) for inner in each.modules()}
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in _ITEMS:
                return self._values(value)
            case ast.IfExp(body=body, orelse=orelse):
                return self._union([body, orelse])
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return self._union(parts)
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element):
                return self._values(element)
        return set()

    def _union(self, nodes: Iterable[ast.expr]) -> set[nn.Module]:
        return {module for node in nodes for module in self._values(node)}

    def _variable(self, name: str) -> set[nn.Module]:
        if name in self._modules:
            return _with_items(self._modules[name])
        if name in self._entered:  # it is assigned something made from itself
            return set()
        self._entered.add(name)
        try:
            return self._union(map(self._bound, self._source.bindings.get(name, ())))
        finally:
            self._entered.remove(name)

    def _attribute(self, value: ast.expr, name: str) -> set[nn.Module]:
        return _with_items(modules_in([_held(owner, name) for owner in self._values(value)]))

    def _item(self, value: ast.expr, name: str, index: ast.expr) -> set[nn.Module]:
        """What ``value.name[index]`` may be."""
        found = set()
        for owner in self._values(value):
            each = _held(owner, name)
            if isinstance(each, nn.Sequential | nn.ModuleList):
                items = {str(place): child for place, child in enumerate(each)}
                each = items.get(ast.unparse(index), each)
            found |= _with_items(modules_in(each))
        return found

    def _bound(self, name: ast.Name) -> ast.expr:
        """The expression whose value, or one of whose items, is assigned to a variable."""
        node: ast.AST = name
        while isinstance(self._source.parents[node], ast.Tuple | ast.List | ast.Starred):
            node = self._source.parents[node]
        match self._source.parents[node]:
            case ast.Assign(value=value) | ast.NamedExpr(value=value):
                return value
            case ast.AnnAssign(value=ast.expr() as value):
                return value
            case ast.For(iter=iterable) | ast.comprehension(iter=iterable):
                return iterable
            case ast.withitem(context_expr=context):
                return context
        return ast.Constant(None)


def _held(owner: nn.Module, name: str) -> object:
    """A child, or another attribute of the object itself."""
    return owner._modules[name] if name in owner._modules else vars(owner).get(name)


def _with_items(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """Modules, with the items of those that are containers."""
    found: set[nn.Module] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                waiting += module.children()
    return found
