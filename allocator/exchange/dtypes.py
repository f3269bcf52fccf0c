"""Element types, and their names in DLPack and numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # DLPack's type codes


class DType(NamedTuple):
    """An element type."""

    name: str
    """torch's name, without ``torch.``."""
    code: int
    """DLPack's type code."""
    bits: int
    """bits of one lane."""
    lanes: int = 1
    typestr: str | None = None
    """type string of ``__array_interface__``; None if numpy has no such type."""

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return self.bits * self.lanes // 8


_ALL = [
    DType("bool", _BOOL, 8, 1, "|b1"),
    DType("uint8", _UINT, 8, 1, "|u1"),
    DType("uint16", _UINT, 16, 1, "<u2"),
    DType("uint32", _UINT, 32, 1, "<u4"),
    DType("uint64", _UINT, 64, 1, "<u8"),
    DType("int8", _INT, 8, 1, "|i1"),
    DType("int16", _INT, 16, 1, "<i2"),
    DType("int32", _INT, 32, 1, "<i4"),
    DType("int64", _INT, 64, 1, "<i8"),
    DType("float16", _FLOAT, 16, 1, "<f2"),
    DType("bfloat16", _BFLOAT, 16),
    DType("float32", _FLOAT, 32, 1, "<f4"),
    DType("float64", _FLOAT, 64, 1, "<f8"),
    DType("complex32", _COMPLEX, 32),
    DType("complex64", _COMPLEX, 64, 1, "<c8"),
    DType("complex128", _COMPLEX, 128, 1, "<c16"),
    DType("float8_e4m3fn", 10, 8),
    DType("float8_e4m3fnuz", 11, 8),
    DType("float8_e5m2", 12, 8),
    DType("float8_e5m2fnuz", 13, 8),
    DType("float8_e8m0fnu", 14, 8),
    DType("float4_e2m1fn_x2", 17, 4, 2),
]
_BY_NAME = {dtype.name: dtype for dtype in _ALL}
_BY_CODE = {(dtype.code, dtype.bits, dtype.lanes): dtype for dtype in _ALL}


def as_dtype(dtype: Any) -> DType:
    """The element type of a dtype of torch or numpy, or of a name; raises TypeError."""
    if isinstance(dtype, DType):
        return dtype
    if getattr(dtype, "isnative", True) is False:
        raise TypeError(f"dtype {dtype!r} has a byte order other than this machine's")
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    if isinstance(dtype, type):  # numpy's scalar classes and Python's own
        import numpy as np

        name = np.dtype(dtype).name
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):  # TypeError: a name that is a list
        raise TypeError(
            f"dtype {dtype!r} cannot be shared through DLPack; use one of {', '.join(_BY_NAME)}"
        ) from None


def dtype_of_code(code: int, bits: int, lanes: int) -> DType:
    """The element type of a DLPack tensor; raises BufferError."""
    try:
        return _BY_CODE[code, bits, lanes]
    except KeyError:
        raise BufferError(
            f"a DLPack tensor of type code {code} with {bits} bits and {lanes} lanes is not "
            f"supported; convert it to one of {', '.join(_BY_NAME)}"
        ) from None
