"""Sizes, shapes, strides and switches given by users, checked."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

MOST_DIMS = 64  # of numpy and torch
_MOST_BYTES = 2**63 - 1


def parse_size(size: int | str, argument: str) -> int:
    """Bytes of a size such as 4096, "64MiB" or "2 GB"; raises TypeError or ValueError."""
    advice = f"{argument}={size!r} is not a size; write it as 4096 or '64MiB'"
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", size, re.IGNORECASE)
        if match is None:
            raise ValueError(advice)
        power = " KMGT".index(match[2].upper() or " ")
        base = 1024 if match[3] or not match[2] else 1000
        whole, _, decimals = match[1].partition(".")
        return int(int(whole + decimals) * base**power // 10 ** len(decimals))
    if size != size:
        raise ValueError(advice)
    try:
        nbytes = as_integer(size, argument)
    except TypeError:
        raise TypeError(advice) from None
    if nbytes < 0:
        raise ValueError(f"{argument}={size!r} is negative; give 0 or more")
    return nbytes


def as_integer(value: Any, argument: str, whole: Any = None) -> int:
    """An argument, or an element of the argument ``whole``, as an integer; raises TypeError."""
    number: Any = None if isinstance(value, bool) else value
    try:
        return operator.index(number)
    except TypeError:
        shown = value if whole is None else whole
        raise TypeError(f"{argument}={shown!r}: {value!r} is not an integer") from None


def as_number(value: Any, argument: str) -> float:
    """An argument as an integer or float; raises TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{argument}={value!r} is not a number")
    return value


def check_bool(value: Any, argument: str) -> None:
    """Raise TypeError unless an argument is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument}={value!r} is not True or False")


def as_nbytes(nbytes: Any) -> int:
    """A number of bytes as an integer; raises TypeError or ValueError."""
    size = as_integer(nbytes, "nbytes")
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"nbytes={nbytes!r} is not in [0, 2^63 - 1]")
    return size


def are_integers(shape: Any) -> bool:
    """Whether ``shape`` is a tuple of Python integers, without booleans and floats."""
    if shape.__class__ is not tuple:
        return False
    for n in shape:  # noqa: SIM110 - all() over a generator is much slower
        if n.__class__ is not int:
            return False
    return True


def as_shape(shape: Any) -> tuple[int, ...]:
    """A shape given as one integer or as a sequence of them.

    Raises ValueError for a negative dimension, more than 64 of them, and more than 2^63 - 1
    elements, for which torch would abort the process.
    """
    is_whole = not isinstance(shape, Iterable) or isinstance(shape, str | bytes)
    # An array or tensor without dimensions has a method __iter__, which raises.
    dims = (shape,) if is_whole or getattr(shape, "ndim", 1) == 0 else shape
    sizes = tuple(as_integer(n, "shape", shape) for n in dims)
    if len(sizes) > MOST_DIMS:
        raise ValueError(f"shape has {len(sizes)} dimensions; at most {MOST_DIMS} are supported")
    if min(sizes, default=0) < 0:
        raise ValueError(f"shape={shape!r} has a negative dimension; give 0 or more")
    if math.prod(max(n, 1) for n in sizes) > _MOST_BYTES:
        raise ValueError(f"shape={shape!r} has more than 2^63 - 1 elements")
    return sizes


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array of ``shape``."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(shape[i], 1)
    return tuple(strides)


def as_strides(strides: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements, checked to give every element its own memory.

    Raises ValueError for a negative one too, for which torch would abort the process.
    """
    if not isinstance(strides, Iterable):
        raise TypeError(f"strides={strides!r} is not a sequence of integers")
    steps = tuple(as_integer(n, "strides", strides) for n in strides)
    if len(steps) != len(shape):
        raise ValueError(f"strides={strides!r} has {len(steps)} entries for shape={tuple(shape)}")
    if min(steps, default=0) < 0:
        raise ValueError(f"strides={strides!r} has a negative entry; make a flipped copy instead")
    if max(steps, default=0) > _MOST_BYTES:
        raise ValueError(f"strides={strides!r} has an entry of more than 2^63 - 1")
    reach = 1  # extent of the dimensions with smaller strides, in elements
    for step, size in sorted(zip(steps, shape)):
        if size > 1 and 0 not in shape:
            if step < reach:
                raise ValueError(f"strides={strides!r} lets elements of {tuple(shape)} overlap")
            reach = step * (size - 1) + reach
    return steps


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from an array's first to its last in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides))


def checked_nbytes(nbytes: int, shape: Sequence[int]) -> int:
    """``nbytes`` of an array, checked to fit into an address; raises ValueError."""
    if nbytes > _MOST_BYTES:
        raise ValueError(f"shape={tuple(shape)} takes {nbytes} bytes, more than 2^63 - 1")
    return nbytes
