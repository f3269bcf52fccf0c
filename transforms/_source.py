"""What the code of a module, which could not be traced, does with its children; read, not run."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

from torch import nn

_REACHES_ALL = {"modules", "named_modules", "children", "named_children", "get_submodule"}
_REACHES_ALL |= {"_modules", "__dict__", "parameters", "named_parameters", "state_dict"}


def only_calls(module: nn.Module, name: str) -> bool:
    """Whether ``module.forward`` does nothing with its child ``name`` but call it.

    Of a list or dict of modules: nothing but call the modules that it takes from it. False if the
    source cannot be had or says anything else.
    """
    if "forward" in vars(module):
        return False
    try:
        trees = [_tree(function) for function in reachable(type(module))]
    except (OSError, TypeError, SyntaxError):
        return False
    is_list = isinstance(module._modules[name], nn.ModuleList | nn.ModuleDict)
    return all(_tree_only_calls(tree, name, is_list) for tree in trees)


def reads_only(function: types.FunctionType, place: int, names: set[str]) -> bool:
    """Whether ``function`` does nothing with an argument but read these attributes of it."""
    parameters = [*inspect.signature(function).parameters.values()]
    if place >= len(parameters) or parameters[place].kind is inspect.Parameter.VAR_POSITIONAL:
        return False
    try:
        tree = _tree(function)
    except (OSError, TypeError, SyntaxError):
        return False
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == parameters[place].name:
            user = parents[node]
            if not (isinstance(user, ast.Attribute) and user.attr in names):
                return False
    return True


def reachable(cls: type) -> list[types.FunctionType]:
    """``forward`` and all methods that it can reach by their names, but torch's own."""
    methods: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("torch."):
            methods |= vars(base)
    found: dict[str, types.FunctionType] = {}
    names = ["forward"]
    while names:
        name = names.pop()
        function = _function(methods.get(name))
        if function is not None and name not in found:
            found[name] = function
            names += all_names(function.__code__)
    return list(found.values())


def _function(attribute: object) -> types.FunctionType | None:
    """The Python function of a method, below its decorators."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    if isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    if callable(attribute):
        attribute = inspect.unwrap(attribute)
    return attribute if isinstance(attribute, types.FunctionType) else None


def all_names(code: types.CodeType) -> set[str]:
    """The attributes and globals that the code names, and its inner functions'."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= all_names(constant)
    return names


def _tree(function: Callable[..., Any]) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _tree_only_calls(tree: ast.AST, name: str, is_list: bool) -> bool:
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _REACHES_ALL:
            return False
        if isinstance(node, ast.Constant) and node.value == name:
            return False  # getattr(self, name)
        if not (isinstance(node, ast.Attribute) and node.attr == name):
            continue
        if is_list:
            if not _items_are_called(node, parents, tree):
                return False
        elif not _is_called(node, parents):
            return False
    return True


def _is_called(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    parent = parents.get(node)
    return isinstance(parent, ast.Call) and parent.func is node


def _items_are_called(node: ast.Attribute, parents: dict[ast.AST, ast.AST], tree: ast.AST) -> bool:
    """Whether a list of modules is only indexed or iterated over, and its items only called."""
    used: ast.AST = node
    user = parents[node]
    if isinstance(user, ast.Call) and _is_name(user.func, ("len",)):
        return True
    if isinstance(user, ast.Subscript) and not isinstance(user.slice, ast.Slice):
        return user.value is node and _is_called(user, parents)
    if isinstance(user, ast.Call) and _is_name(user.func, ("enumerate", "zip")):
        used, user = user, parents[user]
    if not (isinstance(user, ast.For | ast.comprehension) and user.iter is used):
        return False
    targets = {n.id for n in ast.walk(user.target) if isinstance(n, ast.Name)}
    return all(
        _is_called(use, parents) or _is_index(use, parents)
        for use in ast.walk(tree)
        if isinstance(use, ast.Name) and use.id in targets and isinstance(use.ctx, ast.Load)
    )


def _is_index(use: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a name is used as an index or a number, as in ``i < n`` or ``x[i]``."""
    parent = parents.get(use)
    if isinstance(parent, ast.Subscript):
        return parent.slice is use
    return isinstance(parent, ast.Compare)


def _is_name(node: ast.AST, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def names_used(cls: type) -> set[str]:
    """The attributes and globals in ``forward`` and in what it calls, but for torch's own code."""
    names: set[str] = set()
    waiting = reachable(cls)
    seen = set(waiting)
    while waiting:
        function = waiting.pop()
        used = all_names(function.__code__)
        names |= used
        for name in used:
            called = _function(function.__globals__.get(name))
            if called is not None and called not in seen and not _is_torchs(called):
                seen.add(called)
                waiting.append(called)
    return names


def _is_torchs(function: types.FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] == "torch"
