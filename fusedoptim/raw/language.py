"""The language of raw kernels that are written in Python.

Each argument is annotated with what the caller passes:

========================================== =================================================
annotation                                 argument
========================================== =================================================
Int8, Int16, Int32, Int64, UInt8 ...       an integer
Float32, Float64                           a real number
``Global[Float32]``, of any type here      memory of the device: a tensor or an array
``Local[Float32]``, of any type here       memory of a work-group: a ``LocalMemory``
========================================== =================================================

Float16 and BFloat16 are types of memory only: a load gives a float32, a store rounds to nearest
even. Indices are not checked, and a negative one does not count from the end.

The function runs once for each work item, whose index is :func:`global_id`. It may use ``if``,
``for``, ``while``, arithmetic, ``abs``, ``min``, ``max``, functions of ``math``, numbers of its
module, of imported modules and of its closure, and plain functions, which are compiled with it. It
returns nothing and raises nothing. A number such as ``0.5`` is a float32 unless an argument of the
kernel is Float64, and ``+``, ``-``, ``*`` and ``/`` of an integer and a float32 give a float32. The
other conversions are numba's: a quotient of integers, ``float(i)``, ``math.sqrt(i)`` and comparing
a variable integer with a float32 are float64 (write ``numpy.float32(i)``). A division by zero gives
infinity or NaN, and 0 for ``//`` and ``%`` of integers.

The functions of ``math`` that compile are: acos, acosh, asin, asinh, atan, atan2, atanh, ceil,
copysign, cos, cosh, erf, erfc, exp, expm1, fabs, floor, fmod, gamma, isinf, isnan, lgamma, log (of
one argument), log10, log1p, pow, sin, sinh, sqrt, tan, tanh, trunc.

A kernel in this language (launching it needs the ``[jit]`` extra)::

    def saxpy(n: Int64, a: Float32, x: Global[Float32], y: Global[Float32]) -> None:
        i = global_id(0)
        if i < n:
            y[i] = fma(a, x[i], y[i])

    RawKernel(saxpy)(1024, 16, (1000, 0.5, x, y))

Source: numba (https://numba.readthedocs.io) compiles the function, and numba-dpex makes it SPIR-V.
"""

from __future__ import annotations

from typing import Annotated, Generic, NamedTuple, NoReturn, TypeVar

from fusedoptim.kernels.language import fma as fma

__all__ = [
    "BFloat16",
    "Float16",
    "Float32",
    "Float64",
    "Global",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "Local",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "barrier",
    "fma",
    "global_id",
    "global_size",
    "group_id",
    "local_id",
    "local_size",
]

Number = TypeVar("Number", int, float)


class Element(NamedTuple):
    """The type of one number: what an annotation of this module stands for."""

    dtype: str
    """A name such as "f32" or "u8"."""


Int8 = Annotated[int, Element("i8")]
"""an integer of 8 bits."""
Int16 = Annotated[int, Element("i16")]
"""an integer of 16 bits."""
Int32 = Annotated[int, Element("i32")]
"""an integer of 32 bits."""
Int64 = Annotated[int, Element("i64")]
"""an integer of 64 bits."""
UInt8 = Annotated[int, Element("u8")]
"""an integer of 8 bits without sign."""
UInt16 = Annotated[int, Element("u16")]
"""an integer of 16 bits without sign."""
UInt32 = Annotated[int, Element("u32")]
"""an integer of 32 bits without sign."""
UInt64 = Annotated[int, Element("u64")]
"""an integer of 64 bits without sign."""
Float32 = Annotated[float, Element("f32")]
"""a real number of 32 bits."""
Float64 = Annotated[float, Element("f64")]
"""a real number of 64 bits."""
Float16 = Annotated[float, Element("f16")]
"""a real number of 16 bits, in memory only."""
BFloat16 = Annotated[float, Element("bf16")]
"""the upper half of a float32, in memory only."""


class _Memory(Generic[Number]):
    def __getitem__(self, index: int, /) -> Number:
        """The number at ``index``."""
        _on_device_only()

    def __setitem__(self, index: int, value: Number, /) -> None:
        """Store ``value``, converted, at ``index``."""
        _on_device_only()


class Global(_Memory[Number]):
    """Numbers in the device's memory, which all work items see."""


class Local(_Memory[Number]):
    """Numbers that the work items of one group share; a store and a load need a barrier between."""


def global_id(dimension: int = 0) -> int:
    """Index of this work item among all.

    Args:
        dimension: 0, 1 or 2; 0 is the first of ``global_size``.
    """
    _on_device_only()


def local_id(dimension: int = 0) -> int:
    """Index of this work item in its group.

    Args:
        dimension: 0, 1 or 2; 0 is the first of ``global_size``.
    """
    _on_device_only()


def group_id(dimension: int = 0) -> int:
    """Index of this work item's group.

    Args:
        dimension: 0, 1 or 2; 0 is the first of ``global_size``.
    """
    _on_device_only()


def global_size(dimension: int = 0) -> int:
    """Number of work items.

    Args:
        dimension: 0, 1 or 2; 0 is the first of ``global_size``.
    """
    _on_device_only()


def local_size(dimension: int = 0) -> int:
    """Number of work items in a group.

    Args:
        dimension: 0, 1 or 2; 0 is the first of ``global_size``.
    """
    _on_device_only()


def barrier() -> None:
    """Wait for all work items of the group, which must all call this, and see their stores."""
    _on_device_only()


def _on_device_only() -> NoReturn:
    raise RuntimeError(
        "this has a meaning only in a kernel: launch it with fusedoptim.raw.RawKernel"
    )
