"""Finds open conditions in a function, and the code that did not run because of them.

A trace follows one path. A condition is fixed if it depends only on the model's configuration, as
``if self.downsample is not None`` does. All others are open, and may differ in another call: the
type of an argument, whether it is None, a global mode, a counter.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import operator
import textwrap
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableSet, Sequence
from typing import Any, NamedTuple

from torch import nn

_PURE = {"len", "isinstance", "issubclass", "hasattr", "getattr", "callable", "type", "bool", "int"}
_PURE |= {"float", "str", "abs", "any", "all", "min", "max", "sum", "sorted", "list", "tuple"}
_PURE |= {"set", "frozenset", "dict", "range", "enumerate", "zip", "reversed"}
"""Builtins whose result is fixed if their arguments are."""
_PURE_METHODS = {"startswith", "endswith", "lower", "upper", "get", "keys", "values", "items"}
_PURE_METHODS |= {"format", "join", "replace", "strip", "split"}
_LOOKUPS = {"get", "pop", "setdefault", "__getitem__"}
_VARIABLES = {"globals", "locals", "vars"}
_EVALUATING = {"eval", "exec"}
_GETTERS = (operator.attrgetter, operator.itemgetter, operator.methodcaller)
_ORDERING = {"sorted", "min", "max"}
_FILLING = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault"}
_FILLING |= {"remove", "discard", "pop", "popleft", "popitem", "clear", "sort", "reverse"}
"""Methods that change what their object contains. So do those of a tensor that end in _."""
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_LITERALS = (ast.List, ast.Tuple, ast.Dict)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))  # except* is new in Python 3.11
_WITH = (ast.With, ast.AsyncWith)
_COMPOSED = ast.BoolOp | ast.BinOp | ast.UnaryOp | ast.Compare | ast.IfExp | ast.Subscript
_COMPOSED |= ast.Slice | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.JoinedStr
_COMPOSED |= ast.FormattedValue
_NO_CODE = (ast.Global, ast.Nonlocal, ast.Pass)
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Changing(NamedTuple):
    """Names of attributes that may differ in another call."""

    values: frozenset[str]
    """Those of properties, and those that code assigns to."""
    contents: frozenset[str]
    """Those of lists, dicts and others whose items code changes."""


class Source:
    """The source of a function with its nested functions, and line numbers of the file."""

    def __init__(self, tree: ast.FunctionDef | ast.AsyncFunctionDef, first_line: int) -> None:
        self.tree = tree
        self.first_line = first_line
        self.last_line = _span(tree)[-1]
        self.nodes = [*ast.walk(tree)]
        """All nodes of the tree, which is walked once for all traces."""
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.names: dict[str, list[ast.Name]] = {}
        """The uses of each variable."""
        for node in self.nodes:
            if isinstance(node, ast.Name):
                self.names.setdefault(node.id, []).append(node)

    @property
    def parameters(self) -> list[str]:
        """The names of the function's parameters."""
        return _parameters(self.tree)

    @functools.cached_property
    def all_parameters(self) -> frozenset[str]:
        """The parameters of the function and its nested functions."""
        return frozenset(name for node in self.nodes for name in _parameters(node))

    @functools.cached_property
    def bindings(self) -> dict[str, list[ast.Name]]:
        """For each variable that the code assigns or deletes, where it does so."""
        found = {
            name: [node for node in nodes if not isinstance(node.ctx, ast.Load)]
            for name, nodes in self.names.items()
        }
        return {name: nodes for name, nodes in found.items() if nodes}

    @functools.cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """The function's own import statements."""
        return [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]

    @functools.cached_property
    def outer(self) -> frozenset[str]:
        """The variables that are declared global or nonlocal."""
        declared = (node for node in self.nodes if isinstance(node, ast.Global | ast.Nonlocal))
        return frozenset(name for node in declared for name in node.names)

    @functools.cached_property
    def stored(self) -> frozenset[str]:
        """The attributes that the code assigns to."""
        attributes = (node for node in self.nodes if isinstance(node, ast.Attribute))
        return frozenset(node.attr for node in attributes if isinstance(node.ctx, ast.Store))

    @functools.cached_property
    def filled(self) -> list[ast.expr]:
        """The variables and attributes whose contents the code changes."""
        return [*_filled_by(self.nodes)]

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that contains a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def covers(self, line: int) -> bool:
        """Whether a line is part of the function."""
        return self.first_line <= line <= self.last_line


@functools.lru_cache(maxsize=1024)
def source_of(code: types.CodeType) -> Source | None:
    """The source of a function's code; None if it cannot be read."""
    try:
        text = textwrap.dedent(inspect.getsource(code))
        body = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, IndentationError):
        return None
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    ast.increment_lineno(body[0], code.co_firstlineno - 1)
    return Source(body[0], code.co_firstlineno)


class Conditions:
    """The open conditions of a function.

    ``modules`` are parameters that hold modules of the model, such as ``self``. ``changing`` are
    attributes of these modules.
    """

    def __init__(
        self,
        source: Source,
        modules: Iterable[str],
        changing: Changing,
        namespace: Mapping[str, object],
    ) -> None:
        self._source = source
        self._namespace = namespace
        self._changing = changing.values | source.stored
        attributes = {node.attr for node in source.filled if isinstance(node, ast.Attribute)}
        self._filled = changing.contents | attributes
        self._filled_names = {node.id for node in source.filled if isinstance(node, ast.Name)}
        self._locals = source.all_parameters | source.bindings.keys()
        self._fixed = set(modules) | (self._locals - source.all_parameters - source.outer)
        while True:  # until all remaining variables depend on fixed values only
            variables = self._fixed & source.bindings.keys()
            wrong = {name for name in variables if not self._is_fixed_variable(name)}
            if not wrong:
                break
            self._fixed -= wrong
        self.lines = frozenset(self._open_lines())
        """The lines on which an open condition is evaluated."""

    def not_run(self, ran: set[int]) -> Iterator[ast.AST]:
        """Code that did not run, but may run in another call; ``ran`` has the lines that ran."""
        yield from self._not_run(self._source.tree.body, ran)
        for node in self._source.nodes:  # lines do not tell what ran within a statement
            if isinstance(node, ast.stmt | ast.expr) and _ran(self._source.statement(node), ran):
                yield from self._arms(node)
                if isinstance(node, ast.Name) and self._may_hold_another(node):
                    yield node

    def _not_run(self, block: list[ast.stmt], ran: set[int]) -> Iterator[ast.AST]:
        last: ast.stmt | None = None
        for statement in block:
            if isinstance(statement, _NO_CODE) or _is_text(statement):
                continue
            if _ran(statement, ran):
                last = statement
                for inner in self._blocks(statement):
                    if inner and not any(_ran(each, ran) for each in inner):
                        if self._is_open(statement) and not _only_raises(inner):
                            yield from inner
                    else:
                        yield from self._not_run(inner, ran)
            elif last is None or self._may_end_otherwise(last):
                yield statement
            else:
                return

    def _may_hold_another(self, name: ast.Name) -> bool:
        """Whether a variable, where it is read, may hold another of the values it is assigned."""
        if not isinstance(name.ctx, ast.Load) or name.id in self._fixed:
            return False
        values = len(self._bindings(name)) + (name.id in self._source.all_parameters)
        return values > 1

    def _blocks(self, statement: ast.stmt) -> list[list[ast.stmt]]:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return []
        names = ("body", "orelse", "finalbody")
        blocks = [getattr(statement, name, []) for name in names]
        blocks += [handler.body for handler in getattr(statement, "handlers", [])]
        return blocks + [case.body for case in getattr(statement, "cases", [])]

    def _may_end_otherwise(self, statement: ast.stmt) -> bool:
        """Whether an open condition may be why the statement after this one did not run."""
        inner = list(self._walk(statement))
        return any(map(self._is_open, inner)) or not any(isinstance(s, _ENDS) for s in inner)

    def _walk(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        yield statement
        for block in self._blocks(statement):
            for inner in block:
                yield from self._walk(inner)

    def _arms(self, node: ast.AST) -> Sequence[ast.AST]:
        """The parts of an expression that depend on an open condition."""
        parts: Sequence[ast.AST] = [node]
        tests: Sequence[ast.AST]
        match node:
            case ast.IfExp():
                parts, tests = [node.body, node.orelse], [node.test]
            case ast.BoolOp():
                parts, tests = node.values[1:], node.values[:-1]
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                tests = [test for each in node.generators for test in each.ifs]
            case ast.Subscript(value=table) if self._is_table(table):
                tests = [node.slice]
            case ast.Subscript(value=table) if _has_variables(table):
                parts, tests = [self._called_with(node)], [node.slice]
            case ast.Call(func=ast.Attribute(attr=name, value=table)) if (
                name in _LOOKUPS and self._is_table(table)
            ):
                tests = node.args
            case ast.Call():
                parts, tests = [self._called_with(node)], self._names(node)
            case ast.If() | ast.While() | ast.For():
                parts = [s for s in (*node.body, *node.orelse) if s.lineno == node.lineno]
                tests = [_decider(node)]
            case _:
                return []
        return [] if all(map(self._is_fixed, tests)) else parts

    def _called_with(self, lookup: ast.expr) -> ast.expr:
        """The call of what a lookup finds, whose arguments may be modules."""
        user = self._source.parents[lookup]
        while isinstance(user, ast.Call) and user.func is lookup:
            lookup, user = user, self._source.parents[user]
        return lookup

    def _names(self, call: ast.Call) -> Sequence[ast.AST]:
        """The arguments by which a call finds a value, as ``getattr`` finds an attribute."""
        match call.func:
            case ast.Name(id="getattr"):
                return call.args[1:2]
            case ast.Attribute(attr="__getattribute__"):
                return call.args[-1:]
            case ast.Name(id=name) if name in _EVALUATING:
                return [call]  # its text may hold any condition
            case ast.Name(id=name) if name in _ORDERING:
                return [each.value for each in call.keywords]
            case ast.Attribute(value=table) if _has_variables(table):
                return call.args
        function = self._global_value(call.func)
        if function is operator.getitem:
            return call.args[1:]
        return call.args if any(function is getter for getter in _GETTERS) else []

    def _is_table(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name) and any(map(self._is_bound_to_table, self._bindings(node))):
            return True
        return isinstance(node, _LITERALS) or self._is_same(node) or self._is_container(node)

    def _bindings(self, name: ast.Name) -> Sequence[ast.Name]:
        return self._source.bindings.get(name.id, ())

    def _is_bound_to_table(self, name: ast.Name) -> bool:
        """Whether a variable is assigned a list, dict or the like that the code makes."""
        parent = self._source.parents[name]
        if not isinstance(parent, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            return False
        match parent.value:
            case ast.Call(func=ast.Name(id=function)):
                return function in _PURE
            case value:
                return isinstance(value, (*_LITERALS, *_COMPREHENSIONS))

    def _is_open(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.If):
            raises = _only_raises(node.orelse) or (_only_raises(node.body) and not node.orelse)
            return not (raises or self._is_fixed(node.test))
        if isinstance(node, ast.While | ast.For):  # its body may not have run in the trace
            return not self._is_fixed(_decider(node))
        if isinstance(node, _TRY):
            passes_on = all(_only_raises(handler.body) for handler in node.handlers)
            return not passes_on or any(map(_may_swallow, node.finalbody))
        if isinstance(node, _WITH):
            return not all(self._is_passed_on(item.context_expr) for item in node.items)
        return isinstance(node, ast.Match) and not self._is_fixed(node.subject)

    def _is_passed_on(self, context: ast.expr) -> bool:
        """Whether a context manager passes on all exceptions, as torch's do."""
        value = self._global_value(context.func if isinstance(context, ast.Call) else context)
        if value is contextlib.nullcontext or value is warnings.catch_warnings:
            return True
        return str(getattr(value, "__module__", "")).partition(".")[0] == "torch"

    def _open_lines(self) -> Iterator[int]:
        for node in self._source.nodes:
            if isinstance(node, ast.stmt) and self._is_open(node):
                yield node.lineno
                if isinstance(node, ast.If | ast.While | ast.For):
                    yield from _span(_decider(node))
                elif isinstance(node, _TRY + _WITH):
                    for statement in node.body:
                        yield from _span(statement)
            elif isinstance(node, ast.comprehension) and not self._is_fixed(node.iter):
                yield from _span(node.iter)
            elif not isinstance(node, ast.stmt) and self._arms(node):
                statement = self._source.statement(node)
                is_block = any(self._blocks(statement))
                yield from _span(node) if is_block else _span(statement)

    def _is_fixed_variable(self, name: str) -> bool:
        """Whether a variable is assigned only fixed values, under fixed conditions."""
        return all(map(self._is_fixed_binding, self._source.bindings[name]))

    def _is_fixed_binding(self, name: ast.Name) -> bool:
        node: ast.AST = name
        while isinstance(self._source.parents[node], ast.Tuple | ast.List | ast.Starred):
            node = self._source.parents[node]
        parent = self._source.parents[node]
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
            is_fixed = parent.value is not None and self._is_fixed(parent.value)
        elif isinstance(parent, ast.For | ast.comprehension):
            is_fixed = self._is_fixed(parent.iter)
        else:
            return False
        while is_fixed and parent in self._source.parents:
            parent = self._source.parents[parent]
            is_fixed = not (isinstance(parent, ast.stmt) and self._is_open(parent))
        return is_fixed

    def _is_fixed(self, node: ast.AST) -> bool:
        """Whether an expression has the same value in every call."""
        return self._is_same(node) and not self._is_filled(node)

    def _is_same(self, node: ast.AST) -> bool:
        """Whether an expression is the same object in every call, whatever it then contains."""
        match node:
            case ast.Constant():
                return True
            case ast.Name():
                return node.id in self._fixed or self._is_fixed_global(node.id)
            case ast.Attribute():
                is_same = node.attr not in self._changing and self._is_same(node.value)
                return is_same and not self._is_container(node)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[table]):
                is_table = self._is_same(table) or self._is_container(table)
                return self._is_fixed(left) and is_table and not self._is_filled(table)
            case ast.Compare(left=left, ops=ops, comparators=others) if all(
                isinstance(op, ast.Is | ast.IsNot) for op in ops
            ):
                return all(map(self._is_same, [left, *others]))
            case ast.Call(func=ast.Name(id=name)):
                is_pure = name in _PURE and name not in self._locals
                return is_pure and not node.keywords and all(map(self._is_fixed, node.args))
            case ast.Call(func=ast.Attribute(attr=name, value=value)):
                parts = [value, *node.args, *(each.value for each in node.keywords)]
                return name in _PURE_METHODS and all(map(self._is_fixed, parts))
            case ast.NamedExpr(value=value):
                return self._is_fixed(value)
        children = (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))
        return isinstance(node, _COMPOSED) and all(map(self._is_fixed, children))

    def _is_fixed_global(self, name: str) -> bool:
        if name in self._locals:
            return False
        if name in self._namespace:
            return not _may_change(self._namespace[name])
        return hasattr(builtins, name)

    def _is_container(self, node: ast.AST) -> bool:
        """Whether it is a list, dict or the like that a global variable leads to."""
        return _may_change(self._global_value(node))

    def _is_filled(self, node: ast.AST) -> bool:
        """Whether it is a global variable or an attribute whose contents code changes."""
        if isinstance(node, ast.Name):
            return node.id in self._filled_names and node.id not in self._locals
        return isinstance(node, ast.Attribute) and node.attr in self._filled

    def _global_value(self, node: ast.AST) -> object:
        """The value of a global variable, or of its attributes; None if it is another node."""
        if isinstance(node, ast.Name) and node.id not in self._locals:
            return self._namespace.get(node.id)
        if isinstance(node, ast.Attribute):
            # No property runs, and no module is imported.
            return inspect.getattr_static(self._global_value(node.value), node.attr, None)
        return None


def _filled_by(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """The variables and attributes whose contents code changes, as ``self.seen[0] += 1`` does."""
    for node in nodes:
        match node:
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
                pass
            case ast.Call(func=ast.Attribute(attr=name, value=value)) if name in _FILLING or (
                name.endswith("_") and not name.endswith("__")
            ):
                pass
            case _:
                continue
        while isinstance(value, ast.Subscript):
            value = value.value
        yield value


def _may_change(value: object) -> bool:
    """Whether the contents of a global value may differ in another call."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return isinstance(value, MutableSet | nn.Module) or hasattr(type(value), "__setitem__")


def _has_variables(node: ast.AST) -> bool:
    """Whether it is the dict of all variables of a function, file or object."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name in _VARIABLES
    return False


def _parameters(tree: ast.AST) -> list[str]:
    if not isinstance(tree, _Function):
        return []
    a = tree.args
    rest = [each for each in (a.vararg, a.kwarg) if each is not None]
    return [each.arg for each in (*a.posonlyargs, *a.args, *a.kwonlyargs, *rest)]


def _decider(node: ast.If | ast.While | ast.For) -> ast.expr:
    """The expression that decides whether a statement's body runs."""
    return node.iter if isinstance(node, ast.For) else node.test


def _span(node: Any) -> range:
    """The lines of a statement or an expression."""
    return range(node.lineno, node.end_lineno + 1)


def _ran(statement: ast.stmt, ran: set[int]) -> bool:
    return not ran.isdisjoint(_span(statement))


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _only_raises(block: list[ast.stmt]) -> bool:
    return bool(block) and isinstance(block[-1], ast.Raise)


def _may_swallow(statement: ast.stmt) -> bool:
    """Whether a statement of a ``finally`` may end it without the exception."""
    ends = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(node, ends) for node in ast.walk(statement))
