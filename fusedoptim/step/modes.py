"""What may be active in torch around a step: tracing, transforms, and other dispatch modes.

A step works on memory. Tracing and functorch's transforms hand out tensors without memory, and
record operations. They would not see what a step does, so it refuses to run there. Any other
dispatch mode may replace what an operation returns; a step's own operations bypass it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from fusedoptim._torch_private import BypassModes, active_modes, set_grad_enabled, transform_level

_P = ParamSpec("_P")
_T = TypeVar("_T")


def on_memory(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that works on tensors' memory: no autograd, and no dispatch modes."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        is_grad_enabled = torch.is_grad_enabled()
        try:
            set_grad_enabled(False)
            with BypassModes():
                return function(*args, **kwargs)
        finally:
            set_grad_enabled(is_grad_enabled)

    return wrapper


def check_not_traced(what: str) -> None:
    """Raise if torch traces or transforms the code that calls ``what``, as errors name it.

    torch.optim's own classes have no common behavior to follow there. Inside FakeTensorMode they
    update real parameters, raise halfway, or leave fake state behind, depending on class and step.
    """
    found = [type(mode).__name__ for mode in active_modes()]
    if transform_level() is not None:
        found.append("a torch.func transform")
    if found:
        raise RuntimeError(
            f"{what} was called inside {found[0]}, which cannot see what it does to memory; call "
            "it outside, or use the torch.optim class"
        )
