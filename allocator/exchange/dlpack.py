"""DLPack's structs and capsules, and tensors imported from other libraries."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from allocator.exchange.dtypes import DType, dtype_of_code
from allocator.pool.sizes import MOST_DIMS

READ_ONLY, IS_COPIED = 1, 2  # flags of a versioned capsule
VERSION = (1, 0)
"""Version of the structs that we write; consumers compare the major version only."""

LEGACY_NAME, VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
USED_NAMES = {LEGACY_NAME: b"used_dltensor", VERSIONED_NAME: b"used_dltensor_versioned"}

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLTensor(ctypes.Structure):
    """A tensor's address, device, element type, shape and strides."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Legacy(ctypes.Structure):
    """A managed tensor of DLPack before 1.0."""

    _fields_ = (
        ("tensor", DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Versioned(ctypes.Structure):
    """A managed tensor of DLPack from 1.0 on."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


def c_api(name: str, result: Any, *arguments: Any) -> Any:
    """A function of CPython's C API."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_capsule, _name, _pointer = ctypes.py_object, ctypes.c_char_p, ctypes.c_void_p
new_capsule = c_api("PyCapsule_New", _capsule, _pointer, _name, _pointer)
is_valid = c_api("PyCapsule_IsValid", ctypes.c_int, _capsule, _name)
_get_pointer = c_api("PyCapsule_GetPointer", _pointer, _capsule, _name)
_set_name = c_api("PyCapsule_SetName", ctypes.c_int, _capsule, _name)


def make_immortal(*objects: Any) -> None:
    """Keep objects alive until the process ends."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


# Capsules keep the names' addresses.
make_immortal(LEGACY_NAME, VERSIONED_NAME, *USED_NAMES.values())


class View(NamedTuple):
    """A tensor as a consumer sees it."""

    address: int
    shape: Sequence[int]
    strides: Sequence[int]
    """strides in elements."""
    dtype: DType
    device: tuple[int, int]
    """DLPack's device type and id."""


class Imported:
    """Another library's tensor, which its deleter releases when this object is freed."""

    def __init__(self, capsule: Any) -> None:
        """Consume ``capsule``; after a BufferError another consumer may still take it."""
        self._deleter: Any = None
        name = next((n for n in USED_NAMES if is_valid(capsule, n)), None)
        if name is None:
            raise ValueError(
                f"{capsule!r} is not a DLPack capsule, or was used before; call __dlpack__() again"
            )
        self._address = _get_pointer(capsule, name)
        kind = Versioned if name == VERSIONED_NAME else Legacy
        managed: Any = kind.from_address(self._address)
        if name == VERSIONED_NAME and managed.major != VERSION[0]:
            raise BufferError(f"DLPack version {managed.major}.{managed.minor} is not supported")
        tensor = managed.tensor
        ndim = tensor.ndim
        if not 0 <= ndim <= MOST_DIMS:
            raise BufferError(f"a DLPack tensor of {ndim} dimensions is not in [0, {MOST_DIMS}]")
        shape = tuple(tensor.shape[:ndim])
        dtype = dtype_of_code(tensor.code, tensor.bits, tensor.lanes)
        strides = tuple(tensor.strides[:ndim]) if tensor.strides else None
        if min(strides or (), default=0) < 0:
            raise BufferError(
                f"a DLPack tensor with strides={strides} is not supported, as torch aborts on a "
                "negative one; make a contiguous copy"
            )
        device = (tensor.device_type, tensor.device_id)
        self.address = (tensor.data or 0) + tensor.byte_offset
        self.shape, self.strides, self.dtype, self.device = shape, strides, dtype, device
        self.is_read_only = bool(name == VERSIONED_NAME and managed.flags & READ_ONLY)
        deleter = _Deleter(managed.deleter) if managed.deleter else None
        _set_name(capsule, USED_NAMES[name])
        self._deleter = deleter  # from here on this object owns it

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


def as_pair(value: Any, argument: str) -> tuple[int, int]:
    """``value`` as two integers; never a TypeError, after which torch would retry."""
    try:
        first, second = value
        return operator.index(first), operator.index(second)
    except (TypeError, ValueError):
        raise ValueError(f"{argument}={value!r} is not a pair such as (1, 0)") from None
