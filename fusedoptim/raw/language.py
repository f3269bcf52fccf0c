"""What a raw kernel that is written in Python may say.

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

The function runs once for each work item, which finds itself by :func:`global_id`. It may use
``if``, ``for``, ``while``, arithmetic, ``abs``, ``min``, ``max``, the functions of ``math``,
numbers of its module and closure, and plain functions, which are compiled with it. It returns
nothing and raises nothing. A number such as ``0.5`` is a float32 unless an argument of the kernel
is Float64, and an integer and a float32 make a float32. The other conversions are numba's: a
quotient of integers, ``float(i)`` and ``math.sqrt(i)`` are float64 (write ``numpy.float32(i)``).
A division by zero gives infinity or NaN, of integers by ``//`` and ``%`` 0.

Source: numba (https://numba.readthedocs.io) compiles the function, and numba-dpex makes it SPIR-V.
"""

from __future__ import annotations

from typing import Annotated, Generic, NamedTuple, NoReturn, TypeVar

from fusedoptim.kernels.language import fma as fma

Number = TypeVar("Number", int, float)


class Element(NamedTuple):
    """The type of one number: what an annotation of this module stands for."""

    dtype: str
    """such as "f32" or "u8"."""


Int8 = Annotated[int, Element("i8")]
Int16 = Annotated[int, Element("i16")]
Int32 = Annotated[int, Element("i32")]
Int64 = Annotated[int, Element("i64")]
UInt8 = Annotated[int, Element("u8")]
UInt16 = Annotated[int, Element("u16")]
UInt32 = Annotated[int, Element("u32")]
UInt64 = Annotated[int, Element("u64")]
Float32 = Annotated[float, Element("f32")]
Float64 = Annotated[float, Element("f64")]
Float16 = Annotated[float, Element("f16")]
BFloat16 = Annotated[float, Element("bf16")]


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
    """Numbers that the work items of one group share; between a store and a load, a barrier."""


def global_id(dimension: int = 0) -> int:
    """Index of this work item among all."""
    _on_device_only()


def local_id(dimension: int = 0) -> int:
    """Index of this work item in its group."""
    _on_device_only()


def group_id(dimension: int = 0) -> int:
    """Index of this work item's group."""
    _on_device_only()


def global_size(dimension: int = 0) -> int:
    """Number of work items."""
    _on_device_only()


def local_size(dimension: int = 0) -> int:
    """Number of work items in a group."""
    _on_device_only()


def barrier() -> None:
    """Wait for all work items of the group, and see what they stored; all must come here."""
    _on_device_only()


def _on_device_only() -> NoReturn:
    raise RuntimeError(
        "this has a meaning in a kernel only: launch it with fusedoptim.raw.RawKernel"
    )
