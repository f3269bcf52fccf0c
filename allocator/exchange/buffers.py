"""The buffer protocol for classes written in Python.

From Python 3.12 on a class may define ``__buffer__``. In older versions only a C type has a buffer,
so one is made here with CPython's public ``PyType_FromSpec``; its only slot is a ctypes function.
That function cannot raise an exception of its own: before 3.12 a refused request is a
``SystemError``, without a reason. So only classes whose objects have a buffer derive from it.

The buffer that a reader gets belongs to a numpy array, so that numpy releases it in C. A Python
function might be called while an exception is pending, and ctypes would clear that exception.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_int, c_void_p, py_object
from typing import Any, Protocol

from allocator.exchange.dlpack import View, c_api, make_immortal


class Lender(Protocol):
    """Memory that arrays lie in."""

    address: int
    nbytes: int
    is_read_only: bool
    views: int

    @property
    def readable_bytes(self) -> int:
        """Bytes that a buffer may have."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and id."""

    def capsule(self, view: View, versioned: bool, flags: int) -> Any:
        """A capsule that describes a view of the memory."""


class Uncopyable:
    """Memory of which a copy would own the same bytes."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can be neither copied nor pickled; copy a tensor made from it")


class _Reader:
    """Keeps memory alive while a numpy array reads it, and counts as one of its views."""

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, memory: Lender) -> None:
        memory.views += 1
        self._memory = memory
        self.__array_interface__ = {
            # numpy 1 accepts no NULL, not even for zero bytes.
            "data": (memory.address or id(self), memory.is_read_only),
            "shape": (memory.readable_bytes,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._memory.views -= 1


def bytes_of(memory: Lender) -> Any:
    """A numpy array of the bytes, which keeps the memory alive."""
    import numpy as np

    return np.asarray(_Reader(memory))


if sys.version_info >= (3, 12):

    class Buffered:
        """Base class of objects whose buffer is that of their ``_buffer()``."""

        __slots__ = ()

        def __buffer__(self, flags: int) -> memoryview:
            return memoryview(self._buffer())  # type: ignore[attr-defined]  # subclasses have it

else:

    class _Slot(ctypes.Structure):
        _fields_ = (("slot", c_int), ("function", c_void_p))

    class _Spec(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char_p),
            ("basicsize", c_int),
            ("itemsize", c_int),
            ("flags", ctypes.c_uint),
            ("slots", ctypes.POINTER(_Slot)),
        )

    _GETBUFFER = 1  # Py_bf_getbuffer of CPython's typeslots.h
    _BASETYPE = 1 << 10  # Py_TPFLAGS_BASETYPE

    _forward = c_api("PyObject_GetBuffer", c_int, py_object, c_void_p, c_int)
    _make_type = c_api("PyType_FromSpec", py_object, ctypes.POINTER(_Spec))

    def _get_buffer(self: Any, view: int, flags: int) -> int:
        # An exception that left this function would be printed, and the result undefined.
        try:
            return int(_forward(self._buffer(), view, flags))
        except BaseException:
            return -1

    def _type_with_buffer(name: bytes) -> Any:
        getter = ctypes.PYFUNCTYPE(c_int, py_object, c_void_p, c_int)(_get_buffer)
        slots = (_Slot * 2)(_Slot(_GETBUFFER, ctypes.cast(getter, c_void_p)))
        spec = _Spec(name, object.__basicsize__, 0, _BASETYPE, slots)
        made = _make_type(ctypes.byref(spec))
        make_immortal(getter, name, made)  # the type, and what it points to, outlive this module
        return made

    Buffered: Any = _type_with_buffer(b"allocator.exchange.buffers.Buffered")
