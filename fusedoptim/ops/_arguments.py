"""Checks of the types of operators' arguments."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor


def check_tensors(function: str, **arguments: Any) -> None:
    """Raise TypeError unless all arguments are tensors, and dense."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{function}: {name} is of type {type(value).__name__}; pass a tensor")
        if value.layout is not torch.strided:
            raise TypeError(f"{function}: {name} has layout {value.layout}; pass {name}.to_dense()")


def as_real(function: str, name: str, value: Any) -> float:
    """A number as a float; TypeError for anything else, such as text that float() would read."""
    if not hasattr(value, "__float__"):
        raise TypeError(
            f"{function}: {name}={value!r} is of type {type(value).__name__}; pass a number"
        )
    return float(value)


def check_constant(function: str, name: str, value: Any) -> None:
    """Raise TypeError for a tensor that requires grad, as it would get none."""
    if isinstance(value, Tensor) and value.requires_grad:
        raise TypeError(
            f"{function}: {name} is a tensor that requires grad; pass {name}.item(), as it has no "
            "gradient"
        )


def as_integer(function: str, name: str, value: Any) -> int:
    """An integer as an int; TypeError for anything else, such as 3.0."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{function}: {name}={value!r} is of type {type(value).__name__}; pass an integer"
        ) from None


def as_int64(function: str, name: str, value: Any) -> int:
    """An integer that int64 holds, as an int; a bool is none, as in torch's functions."""
    if isinstance(value, bool):
        raise TypeError(f"{function}: {name}={value!r} is of type bool; pass an integer")
    number = as_integer(function, name, value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{function}: {name}={value!r} is not an int64; pass a smaller number")
    return number


def check_bool(function: str, name: str, value: Any) -> None:
    """Raise TypeError for anything but a bool, such as 1, as torch's functions do."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{function}: {name}={value!r} is of type {type(value).__name__}; pass True or False"
        )
