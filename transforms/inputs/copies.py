"""Copies a model together with its optimizer, for ``inplace=False``."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from transforms.inputs.arguments import refuse_replaced_methods
from transforms.rewrites.split import merge_copies

Memo = dict[int, Any]
_Model = TypeVar("_Model", bound=nn.Module)


def copy_pair(model: _Model, optimizer: Optimizer | None) -> tuple[_Model, Optimizer | None]:
    """Copy a model and its optimizer, so that the copy of the optimizer updates the copied model.

    Hooks are copied; one that is a method of the model or the optimizer becomes the copy's method.
    Weights whose lower halves another optimizer holds are whole in the copy.

    Raises:
        TypeError: the model or the optimizer cannot be copied.
        RuntimeError: a method was replaced on the optimizer object.
    """
    if optimizer is not None:
        refuse_replaced_methods(optimizer)
    memo: Memo = {}
    try:
        twin = copy.deepcopy(model, memo)
        _carry_tensors(model, twin, memo)
        its_optimizer = None if optimizer is None else _copied(optimizer, memo)
    except Exception as error:  # of any class: the model's own
        raise TypeError(
            f"{type(model).__name__} or its optimizer cannot be copied ({type(error).__name__}: "
            f"{error}): pass inplace=True, which rewrites them and transforms.restore undoes"
        ) from error
    merge_copies(twin)
    return twin, its_optimizer


def _carry_tensors(model: nn.Module, copied: nn.Module, memo: Memo) -> None:
    """Copy what deepcopy omits from parameters: gradients, hooks and attributes."""
    for param, twin in zip(model.parameters(), copied.parameters(), strict=True):
        memo[id(param)] = twin  # a model with its own __deepcopy__ may not have recorded it
        if param.is_leaf and not twin.is_leaf:  # torch copies a ScriptModule's under autograd
            twin.detach_().requires_grad_(param.requires_grad)
        if param.grad is not None and twin.grad is None:
            twin.grad = copy.deepcopy(param.grad, memo)
        # Tensor's methods are not annotated.
        register: Callable[[Any], Any] = twin.register_hook
        register_late: Callable[[Any], Any] = twin.register_post_accumulate_grad_hook
        for hook in (param._backward_hooks or {}).values():
            register(_rebound(hook, memo))
        for hook in (param._post_accumulate_grad_hooks or {}).values():
            register_late(_rebound(hook, memo))
        for name, value in vars(param).items():
            if name not in vars(twin):
                setattr(twin, name, copy.deepcopy(value, memo))


def _copied(optimizer: Optimizer, memo: Memo) -> Optimizer:
    twin = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            registered = getattr(twin, name)
            registered.update({key: _rebound(hook, memo) for key, hook in value.items()})
        elif name != "step" and name not in vars(twin):
            # torch copies groups and state only; a class may keep more in the object.
            setattr(twin, name, copy.deepcopy(value, memo))
    return twin


def _rebound(hook: Callable[..., Any], memo: Memo) -> Callable[..., Any]:
    """The hook, or the copy's method if the hook is a method of a copied object."""
    if isinstance(hook, types.MethodType) and id(hook.__self__) in memo:
        return types.MethodType(hook.__func__, memo[id(hook.__self__)])
    return hook
