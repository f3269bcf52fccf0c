"""The buffer protocol for classes written in Python.

Python 3.12 lets a class define ``__buffer__``. Before it only a C type can, so a type is made here
through CPython's public ``PyType_FromSpec``, whose one slot is a ctypes function. That function
cannot say what is wrong, only that: an object that never has a buffer to give should be of a class
without this base; what it refuses else is a ``SystemError`` there.

The buffer is a numpy array's, which numpy releases in C: a Python function would be called with
whatever exception is pending, and ctypes would clear that.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol


class Readable(Protocol):
    """What has bytes that Python can read."""

    address: int
    is_read_only: bool
    _views: int

    @property
    def _readable(self) -> int: ...


class _Reader:
    """Keeps memory while a numpy array reads it, and counts as one of its views meanwhile."""

    __slots__ = ("__array_interface__", "_memory")

    def __init__(self, memory: Readable) -> None:
        memory._views += 1
        self._memory = memory
        self.__array_interface__ = {
            # numpy 1 takes no NULL, not even for nothing.
            "data": (memory.address or id(self), memory.is_read_only),
            "shape": (memory._readable,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        self._memory._views -= 1


def bytes_of(memory: Readable) -> Any:
    """A numpy array of the bytes, which keeps the memory."""
    import numpy as np

    return np.asarray(_Reader(memory))


if sys.version_info >= (3, 12):

    class Buffered:
        """Base of what gives the buffer of another object, its ``_buffer()``."""

        __slots__ = ()

        def __buffer__(self, flags: int) -> memoryview:
            return memoryview(self._buffer())  # type: ignore[attr-defined]  # the other base's

else:

    class _Slot(ctypes.Structure):
        _fields_ = (("slot", ctypes.c_int), ("function", ctypes.c_void_p))

    class _Spec(ctypes.Structure):
        _fields_ = (
            ("name", ctypes.c_char_p),
            ("basicsize", ctypes.c_int),
            ("itemsize", ctypes.c_int),
            ("flags", ctypes.c_uint),
            ("slots", ctypes.POINTER(_Slot)),
        )

    _GETBUFFER = 1  # Py_bf_getbuffer of CPython's typeslots.h
    _BASETYPE = 1 << 10  # Py_TPFLAGS_BASETYPE

    _api = ctypes.pythonapi
    _int, _pointer, _object = ctypes.c_int, ctypes.c_void_p, ctypes.py_object
    _forward = ctypes.PYFUNCTYPE(_int, _object, _pointer, _int)(("PyObject_GetBuffer", _api))
    _make_type = ctypes.PYFUNCTYPE(_object, ctypes.POINTER(_Spec))(("PyType_FromSpec", _api))

    def _get_buffer(self: Any, view: int, flags: int) -> int:
        # An exception that left this function would be printed, and its result be random.
        try:
            return int(_forward(self._buffer(), view, flags))
        except BaseException:
            return -1

    def _type_with_buffer(name: bytes) -> Any:
        getter = ctypes.PYFUNCTYPE(_int, _object, _pointer, _int)(_get_buffer)
        slots = (_Slot * 2)(_Slot(_GETBUFFER, ctypes.cast(getter, _pointer)))
        spec = _Spec(name, object.__basicsize__, 0, _BASETYPE, slots)
        made = _make_type(ctypes.byref(spec))
        # The type may outlive this module: everything that it points to does too.
        for part in (getter, name, made):
            _api.Py_IncRef(_object(part))
        return made

    Buffered: Any = _type_with_buffer(b"allocator.exchange.buffers.Buffered")
