"""A model that torch.compile runs by our backend: the object, its class and its hooks stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from transforms.rewrites.packed import PackedModule
from transforms.rewrites.watched_parameter import unwatch

_MARK = "_fusedoptim_compiled_call"
_CALL = "_compiled_call_impl"
"""Where torch keeps the compiled ``__call__`` of a module. Copies and pickles lack it."""


class _Mark:
    """Tells which compiled call is ours; that of a copy is none."""

    def __init__(self, call: object = None) -> None:
        self.call = call

    def __reduce__(self) -> tuple[type[_Mark], tuple[()]]:
        return _Mark, ()

    def __deepcopy__(self, memo: object) -> _Mark:
        return _Mark()


def enter(model: nn.Module, backend: Callable[..., Any]) -> None:
    """Compile the model's calls when they are made, hooks included."""

    # torch.compile does not capture the code of torch's own modules, such as Sequential, where a
    # call begins there, as it does with Module.compile.
    def called(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch

    # All models share the code of that function, and its number of recompilations is limited.
    compiled: Any = torch.compile  # its overloads lack this argument
    call = compiled(called, backend=backend, isolate_recompiles=True)
    vars(model)[_MARK] = _Mark(call)
    vars(model)[_CALL] = call


def leave(model: nn.Module) -> None:
    """Call the model as before; do nothing to others."""
    if vars(model).pop(_MARK, None) is None:
        return
    vars(model).pop(_CALL, None)
    modules = (m for m in model.modules() if isinstance(m, PackedModule))
    packed = {id(param) for module in modules for param in module.packed_parameters()}
    for param in model.parameters():
        if id(param) not in packed:
            unwatch(param)


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
