"""A model and its optimizer copied together, so that the copies belong to each other."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import nn
from torch.optim import Optimizer


def copy_pair(model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    """Copy both, gradients too; the copied optimizer has the copy's parameters and its own hooks.

    A learning rate scheduler that was made for the given optimizer stays with that one.

    Raises:
        TypeError: something that belongs to them cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(model, memo)
        for param, new in zip(model.parameters(), copied.parameters()):
            new.grad = None if param.grad is None else param.grad.clone()  # which deepcopy drops
        return copied, None if optimizer is None else _copy_optimizer(optimizer, memo)
    except Exception as error:  # of any class: the model's own
        raise TypeError(
            f"this {type(model).__name__} cannot be copied ({error}): optimize with inplace=True, "
            "which rewrites the model itself and restore() undoes"
        ) from error


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    copied = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            setattr(copied, name, value.copy())
        elif name not in vars(copied) and name != "step":  # step: a scheduler's wrapper of the old
            # torch's protocol leaves out what a class adds to it.
            vars(copied)[name] = _copied(value, memo)
    return copied


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except TypeError:  # a lock or the like
        return value
