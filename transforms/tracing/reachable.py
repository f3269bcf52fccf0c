"""Finds the functions that a module's forward code may reach, by the names in it."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator
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

    def __init__(self, module: nn.Module) -> None:
        self._methods: dict[str, set[types.FunctionType]] = {}
        self._added: set[type] = set()
        classes = {cls for each in module.modules() for cls in type(each).__mro__}
        self._files = {cls.__module__ for cls in classes if not is_torchs(cls)} - {"builtins"}
        for each in module.modules():
            self._add(type(each))
            for name, value in vars(each).items():
                self._note(name, getattr(value, "__func__", value))
                if type(value).__module__ in self._files or any(modules_behind(value)):
                    self._add(type(value))

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
                for value in (*map(function.__globals__.get, mentioned), *_enclosed(function)):
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


def _enclosed(function: types.FunctionType) -> Iterable[object]:
    return closure_of(function).values()


def _is_installed(name: str) -> bool:
    """Whether a Python module is of the standard library, or was installed."""
    if name.partition(".")[0] in _OURS | sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return any(part.endswith("-packages") for part in Path(file).parts)
