"""Finds the functions that a module's forward code may reach, by the names in it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from torch import Tensor, nn

from transforms.tracing.bytecode import attributes_of_first_argument
from transforms.tracing.source import (
    all_names,
    closure_of,
    is_torchs,
    modules_behind,
    python_function,
)

_IMPLICIT = {"__call__", "__init__", "__iter__", "__next__", "__getitem__", "__getattr__"}
_IMPLICIT |= {"__getattribute__", "__enter__", "__exit__", "__contains__", "__len__", "__get__"}
"""Methods that code calls without their names."""
_OURS = {"fusedoptim", "transforms", "allocator"}


class Reachable:
    """The functions that code of a module may reach.

    A name in the code stands for every method of that name: of the module, of those inside it, of
    objects that hold modules or whose class is in the same file, and of classes in the code. Names
    of a tensor's methods only count for ``self``. Code of libraries is left out, except in files
    with a class of a module.
    """

    def __init__(self, module: nn.Module, layers: Container[nn.Module]) -> None:
        """``layers`` are modules whose own code is not followed."""
        self._methods: dict[str, set[types.FunctionType]] = {}
        self._added: set[type] = set()
        modules = [each for each in module.modules() if each not in layers]
        classes = {cls for each in modules for cls in type(each).__mro__}
        self._files = {cls.__module__ for cls in classes if not is_torchs(cls)} - {"builtins"}
        for each in modules:
            self._add(type(each))
            for name, value in vars(each).items():
                self._note(name, method_of(each, name))
                if type(value).__module__ in self._files or any(modules_behind(value)):
                    self._add(type(value))

    @property
    def methods(self) -> frozenset[types.FunctionType]:
        """The methods of the module, of those inside it, and of objects that they hold."""
        return frozenset(f for functions in self._methods.values() for f in functions)

    def from_names(self, names: Iterable[str]) -> Iterator[types.FunctionType]:
        """The functions that code with these names may reach: methods of the module."""
        return self.from_functions(f for name in names for f in self._methods.get(name, ()))

    def from_functions(
        self, functions: Iterable[types.FunctionType]
    ) -> Iterator[types.FunctionType]:
        """The functions, and those that they may reach."""
        waiting = set(functions)
        seen: set[types.FunctionType] = set()
        names: set[str] = set()
        while waiting:
            function = waiting.pop()
            seen.add(function)
            if not self._is_others(function):
                yield function
                mentioned = all_names(function.__code__)
                own = attributes_of_first_argument(function.__code__)
                names |= {name for name in mentioned if name in own or not hasattr(Tensor, name)}
                values = map(function.__globals__.get, mentioned)
                for value in (*values, *closure_of(function).values()):
                    waiting.update(self._of_value(value, mentioned))
            if not waiting:  # classes may have been added since their methods were mentioned
                waiting.update(f for name in names for f in self._methods.get(name, ()))
            waiting -= seen

    def _of_value(self, value: object, names: set[str]) -> Iterator[types.FunctionType]:
        """The functions that a global variable, or one of an enclosing function, leads to."""
        if isinstance(value, types.ModuleType):
            for name in names & vars(value).keys():
                found = vars(value)[name]
                if not isinstance(found, types.ModuleType):
                    yield from self._of_value(found, names)
        elif isinstance(value, type):
            self._add(value)
            if not (self._is_others(value) or issubclass(value, nn.Module)):
                for name in _IMPLICIT:
                    yield from self._methods.get(name, ())
        elif (function := python_function(value)) is not None:
            yield function
        else:
            self._add(type(value))

    def _add(self, cls: type) -> None:
        """Note the methods of a class of the user's."""
        if cls in self._added:
            return
        self._added.add(cls)
        for base in cls.__mro__:
            if not self._is_others(base):
                for name, value in vars(base).items():
                    if name == "__init__" and issubclass(base, nn.Module):
                        continue  # forward makes no modules
                    self._note(name, value)

    def _is_others(self, thing: type | types.FunctionType) -> bool:
        """Whether a class or function is of a library, and of none of the model's files."""
        name = thing.__module__ or ""
        return name not in self._files and _is_installed(name)

    def _note(self, name: str, value: object) -> None:
        if (function := python_function(value)) is not None:
            self._methods.setdefault(name, set()).add(function)


def method_of(module: nn.Module, name: str) -> types.FunctionType | None:
    """The function that replaces a method on the object itself, if one does."""
    value = vars(module)[name]
    return python_function(getattr(value, "__func__", value))


def functions_among(values: Iterable[object]) -> set[types.FunctionType]:
    """The Python functions among values, without their decorators."""
    return {f for f in map(python_function, values) if f is not None}


@functools.lru_cache(maxsize=1024)
def _is_installed(name: str) -> bool:
    """Whether a Python module is of the standard library, or was installed."""
    if name.partition(".")[0] in _OURS | sys.stdlib_module_names:
        return True
    file = Path(getattr(sys.modules.get(name), "__file__", None) or "")
    is_in_environment = sys.prefix != sys.base_prefix and file.is_relative_to(sys.prefix)
    return is_in_environment or any(part.endswith("-packages") for part in file.parts)
