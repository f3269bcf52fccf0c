"""A model whose calls torch.compile runs by our backend: the object, class and hooks stay."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fusedoptim._torch_private import tracing_state
from transforms.rewrites.packed import PackedModule
from transforms.rewrites.watched_parameter import unwatch
from transforms.tracing.modules import GLOBAL_HOOKS, all_hooks

_MARK = "_fusedoptim_compiled_call"
_CALL = "_compiled_call_impl"
"""Where torch keeps the compiled ``__call__`` of a module. Copies and pickles lack it."""
_NO_HOOKS = "none"
_MOST_CAPTURES = 64
"""How many kinds of calls torch captures before it computes others without a plan. Its own limit of
8 is soon reached: gradient modes, dtypes of autocast, ranks and shapes multiply."""


class _Mark:
    """Records which compiled call is ours; in a copy of the model it records none."""

    def __init__(self, call: object = None, forget: Callable[[], object] = lambda: None) -> None:
        self.call = call
        self.forget = forget

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()

    def __deepcopy__(self, memo: object) -> _Mark:
        return _Mark()


class _Hooks:
    """Gives the hooks of a model a name; what is captured is for one name.

    By default torch.compile compares no hooks of modules, and comparing all of them makes calls
    slower (docs/design/graph-mode.md). But torch counts registrations. So all modules are searched
    only after a new registration, or when a known dict of hooks has changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = _NO_HOOKS
        """A text, because torch.compile would turn a changing number into a variable."""
        self._model = model
        self._names = map(str, itertools.count())
        self._registered = -1
        self._found: list[dict[int, Any]] = []
        """All dicts of hooks that are not empty."""
        self._before: list[dict[int, Any]] = []
        """Copies of them."""

    def look(self) -> None:
        """Change the name if hooks were registered or removed."""
        registered = RemovableHandle.next_id
        if registered == self._registered and self._found == self._before:
            return
        dicts = [*GLOBAL_HOOKS, *(d for m in self._model.modules() for d in all_hooks(m))]
        found = [each for each in dicts if each]
        if found != self._before:
            self.name = next(self._names) if found else _NO_HOOKS
        self._registered, self._found, self._before = registered, found, list(map(dict, found))


def enter(model: nn.Module, backend: Callable[..., Any], forget: Callable[[], object]) -> None:
    """Compile the model's calls when they are made, hooks included.

    ``forget`` is called once when they are no longer needed, as torch keeps what a backend returns.
    """
    hooks = _Hooks(model)
    compiled: dict[str, Callable[..., Any]] = {}
    """By the name of the hooks."""

    # torch.compile does not capture torch's own modules, such as Sequential, if the call begins in
    # their code, as with Module.compile.
    def called(*args: Any, **kwargs: Any) -> Any:
        if not hooks.name:  # read here, so that a capture of a model around this one compares it
            raise AssertionError
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch

    def compiled_for_hooks() -> Callable[..., Any]:
        """What runs the calls while the model has its present hooks.

        Where torch cannot capture a call as a whole, it captures functions that do not compare
        the name of the hooks. Each torch.compile() has captures of its own.
        """
        if hooks.name not in compiled:
            if len(compiled) == _MOST_CAPTURES:
                return called
            # All models share this function's code, and torch limits the recompilations of a code.
            compile_: Any = torch.compile  # its overloads lack these arguments
            compiled[hooks.name] = compile_(
                called, backend=backend, isolate_recompiles=True, recompile_limit=_MOST_CAPTURES
            )
        return compiled[hooks.name]

    def call(*args: Any, **kwargs: Any) -> Any:
        # Within a capture of a model around this one. torch.jit.trace refuses what is compiled.
        if torch.compiler.is_dynamo_compiling() or tracing_state() is not None:
            return called(*args, **kwargs)
        hooks.look()
        return compiled_for_hooks()(*args, **kwargs)

    forget_once = weakref.finalize(model, forget)
    forget_once.atexit = False
    vars(model)[_MARK] = _Mark(call, forget_once)
    vars(model)[_CALL] = call


def leave(model: nn.Module) -> None:
    """Call the model, or a copy of it, as before; do nothing to a model that is not ours."""
    mark: _Mark | None = vars(model).get(_MARK)
    if mark is None:
        return
    mark.forget()
    vars(model).pop(_CALL, None)
    modules = (m for m in model.modules() if isinstance(m, PackedModule))
    packed = {id(param) for module in modules for param in module.packed_parameters()}
    for param in model.parameters():
        if id(param) not in packed:
            unwatch(param)
    vars(model).pop(_MARK)  # last: until then, leave() can be repeated


@contextlib.contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Call the model, and all modules in it, uncompiled inside the with block."""
    calls = [(module, vars(module)[_CALL]) for module in model.modules() if is_entered(module)]
    try:
        for module, _ in calls:
            vars(module).pop(_CALL)
        yield
    finally:
        for module, call in calls:
            vars(module)[_CALL] = call


def is_entered(module: nn.Module) -> bool:
    """Whether calls of the module are compiled by us."""
    mark = vars(module).get(_MARK)
    return mark is not None and mark.call is not None and mark.call is vars(module).get(_CALL)


def is_lost(module: nn.Module) -> bool:
    """Whether the module is a copy, or was unpickled, of one whose calls are compiled by us."""
    return _MARK in vars(module) and not is_entered(module)


def is_marked(module: nn.Module) -> bool:
    """Whether the module is one whose calls we compile, or a copy of one."""
    return _MARK in vars(module)
