"""Arguments that are passed by value: checked, and converted to the bytes of a launch."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from fusedoptim.dtypes import ELEMENTS, Element
from fusedoptim.raw._spirv import Parameter

Convert = Callable[[Any], Any]
"""Converts a caller's argument to a value that :mod:`struct` packs; TypeError, ValueError or
OverflowError say what is wrong, and the cure."""

TRUTH = "truth"
"""The dtype of a parameter that is the truth of its argument: a byte, 0 or 1."""
_VECTOR = re.compile(r"(\w+?)x(\d+)")


def scalar(parameter: Parameter) -> tuple[str, Convert]:
    """The format in which :mod:`struct` packs a parameter, and the function that converts to it."""
    dtype = parameter.dtype
    if dtype == TRUTH:
        return "?", bool
    element = ELEMENTS.get(dtype)
    if element is not None and element.is_float and element.code:
        return element.code, _real(element)
    if match := re.fullmatch(r"(i|u|int)(8|16|32|64)", dtype):
        return _integer(match[1], int(match[2]))
    return f"{parameter.size}s", _bytes(parameter)


def _integer(sign: str, bits: int) -> tuple[str, Convert]:
    low = 0 if sign == "u" else -(1 << bits - 1)
    high = (1 << bits - 1) - 1 if sign == "i" else (1 << bits) - 1
    mask = (1 << bits) - 1 if sign == "int" else -1
    names = {"i": [f"int{bits}"], "u": [f"uint{bits}"]}.get(sign, [f"int{bits}", f"uint{bits}"])

    def convert(value: Any) -> int:
        if type(value) is not int:
            value = _as_int(value, names)
        if low <= value <= high:
            return int(value) & mask if mask != -1 else value
        raise OverflowError(f"{value} is not in {' or '.join(names)}'s range, {low} to {high}")

    return ELEMENTS[f"{'i' if sign == 'i' else 'u'}{bits}"].code, convert


def _as_int(value: Any, names: list[str]) -> int:
    if isinstance(value, int):  # True and False too
        return int(value)
    wanted = " or ".join(names)
    if isinstance(value, np.integer):
        if value.dtype.name in names:
            return int(value)
        raise TypeError(
            f"a numpy {value.dtype.name}, where {wanted} is expected; "
            f"pass int(value) or numpy.{names[-1]}(value)"
        )
    if isinstance(value, (float, np.floating)):
        raise TypeError(f"the float {value!r}, where {wanted} is expected; pass int(value)")
    raise TypeError(f"{_kind(value)}, where {wanted} is expected")


def _real(element: Element) -> Convert:
    name = element.dtype
    most = float(np.finfo(name).max)

    def convert(value: Any) -> float:
        number: float = value if type(value) is float else _as_float(value, name)
        if -most <= number <= most or number - number != 0:  # each format has infinities and NaN
            return number
        raise OverflowError(f"{number} is larger than any {element.c}")

    return convert


def _as_float(value: Any, name: str) -> float:
    if isinstance(value, np.generic):
        if value.dtype.name == name:
            return float(value)
        raise TypeError(
            f"a numpy {value.dtype.name}, where {name} is expected; "
            f"pass float(value) or numpy.{name}(value)"
        )
    if isinstance(value, (float, int)):
        return float(value)  # OverflowError: an integer too large for any float
    raise TypeError(f"{_kind(value)}, where {name} is expected")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        cure = "; pass value.item()" if value.numel() == 1 else ""
        return f"a tensor of shape {tuple(value.shape)}{cure}"
    if value is None:
        return "None, which only a pointer may be"
    return f"{type(value).__name__} {value!r}"


def _bytes(parameter: Parameter) -> Convert:
    """For a vector or a struct: from bytes, an object with a buffer, or a vector's numbers."""
    size = parameter.size
    match = _VECTOR.fullmatch(parameter.dtype)

    def convert(value: Any) -> bytes:
        if match is not None and isinstance(value, (tuple, list, np.ndarray)):
            values = value.ravel() if isinstance(value, np.ndarray) else value
            return _vector(parameter, match[1], int(match[2]), values)
        try:
            data = memoryview(value).tobytes()
        except TypeError:
            wanted = f"bytes, a numpy or a ctypes value of {size} bytes"
            if match is not None:
                wanted = f"a tuple of {match[2]} numbers, or {wanted}"
            raise TypeError(f"{_kind(value)}, where {wanted} is expected") from None
        if len(data) != size:
            raise ValueError(f"a value of {len(data)} bytes, where {size} are expected")
        return data

    return convert


def _vector(parameter: Parameter, dtype: str, count: int, values: Any) -> bytes:
    if len(values) != count:
        raise ValueError(f"{len(values)} numbers, where {count} are expected")
    code, convert = scalar(Parameter("", "scalar", dtype, 0, False))
    data = struct.pack(f"<{count}{code}", *map(convert, values))
    return data.ljust(parameter.size, b"\0")  # three elements take the room of four
