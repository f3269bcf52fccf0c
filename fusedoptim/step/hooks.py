"""Hooks of an optimizer: torch's around a step, at no cost while there are none, and our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from fusedoptim._torch_private import (
    disable_dynamo,
    global_post_hooks,
    global_pre_hooks,
    profiler_enabled,
)

_Step = TypeVar("_Step", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_Hook: TypeAlias = Callable[[Optimizer, dict[str, Any]], None]
"""A hook of ``state_dict`` or ``load_state_dict``."""


def with_hooks(step: _Step) -> _Step:
    """Put torch's hooks and profiler range around ``step``, when there are any.

    torch wraps every ``step`` this way. For an optimizer of one small tensor, torch's profiler
    range would take a large part of the step. ``hooked`` tells torch that this step is wrapped
    already.

    torch.compile must not trace into a step: it would treat the addresses as constants. It
    recognizes ``torch.compiler.is_dynamo_compiling()`` only by its full name.
    """
    hooked = Optimizer.profile_hook_step(step)
    untraced = disable_dynamo(hooked)

    @functools.wraps(step)
    def wrapper(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return untraced(self, *args, **kwargs)
        is_watched = (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or global_pre_hooks
            or global_post_hooks
            or profiler_enabled()
        )
        if is_watched and _leads_to(type(self).step, wrapper):
            return hooked(self, *args, **kwargs)
        if args or kwargs:
            return step(self, *args, **kwargs)
        return step(self)  # unpacking nothing is measurable in a small step

    wrapper.hooked = True  # type: ignore[attr-defined]  # to mypy, functions have no such attribute
    return cast(_Step, wrapper)


def _leads_to(method: Any, wrapper: object) -> bool:
    """Whether a class's ``step`` is ``wrapper``, as it is or decorated.

    Otherwise a subclass has overridden it. torch has wrapped that step, and calls the hooks.
    """
    while method is not None and method is not wrapper:
        method = getattr(method, "__wrapped__", None)
    return method is wrapper


def call_with_hook(
    register: Callable[[_Hook], RemovableHandle], function: _Hook, call: Callable[[], _Result]
) -> _Result:
    """Call ``call`` while ``function`` is an optimizer's hook, which ``register`` makes it.

    An interrupt may come where torch registers the hook or removes it. A hook that stays does
    nothing from then on.
    """
    is_over, handle = False, None

    def hook(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if not is_over:
            function(optimizer, state_dict)

    try:
        handle = register(hook)
        result = call()
    finally:
        is_over = True
        if handle is not None:
            handle.remove()
    return result
