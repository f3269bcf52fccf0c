"""The element types that kernels read and write, and the kernel variants that follow from them.

Every kernel is compiled once for each :class:`Variant`. Dtypes are named by strings, so that the
tables can be read where torch cannot be imported.
"""

from __future__ import annotations

from typing import NamedTuple


class Element(NamedTuple):
    """The type of a number in a device's memory."""

    name: str
    """The name in kernel signatures, such as "f32"."""
    dtype: str
    """The name that torch and numpy share; numpy has no bfloat16."""
    c: str
    """OpenCL C's name. It has no bfloat16, but kernels may give this name to a ushort."""
    code: str
    """The format character of :mod:`struct`; "" where it has none."""
    size: int
    """Bytes."""
    fraction: int = 0
    """Bits after the binary point of a floating-point number, 0 for an integer. One more is the
    sign, and the rest are the exponent."""

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point number."""
        return self.fraction > 0

    @property
    def roundoff(self) -> float:
        """The largest relative error of rounding to this type."""
        return 2.0 ** -(self.fraction + 1)

    @property
    def arithmetic(self) -> str:
        """The name of the element type in which kernels compute."""
        return "f32" if self.is_float and self.size < 4 else self.name


ELEMENTS = {
    element.name: element
    for element in (
        Element("i8", "int8", "char", "b", 1),
        Element("i16", "int16", "short", "h", 2),
        Element("i32", "int32", "int", "i", 4),
        Element("i64", "int64", "long", "q", 8),
        Element("u8", "uint8", "uchar", "B", 1),
        Element("u16", "uint16", "ushort", "H", 2),
        Element("u32", "uint32", "uint", "I", 4),
        Element("u64", "uint64", "ulong", "Q", 8),
        Element("f32", "float32", "float", "f", 4, fraction=23),
        Element("f64", "float64", "double", "d", 8, fraction=52),
        Element("f16", "float16", "half", "e", 2, fraction=10),
        Element("bf16", "bfloat16", "bfloat16", "", 2, fraction=7),
    )
}


class Variant(NamedTuple):
    """One variant of every kernel."""

    name: str
    """The suffix in the names of compiled kernels, such as "adam_bf16"."""
    params: tuple[str, ...]
    """The torch dtypes of the parameters that it updates."""
    element: str
    """The name of the :class:`Element` that holds the parameter's values in memory."""

    @property
    def arithmetic(self) -> str:
        """The dtype of arithmetic and of optimizer state."""
        return ELEMENTS[self.real].dtype

    @property
    def real(self) -> str:
        """The dtype of arithmetic, as an :class:`Element`'s name."""
        return ELEMENTS[self.element].arithmetic


VARIANTS = {
    variant.name: variant
    for variant in (
        # A complex number is two real ones, which every elementwise update treats alike.
        Variant("f32", ("float32", "complex64"), "f32"),
        Variant("f64", ("float64", "complex128"), "f64"),
        Variant("bf16", ("bfloat16",), "bf16"),
        Variant("f16", ("float16",), "f16"),
        # Float32 values in two halves, of which the upper is the bfloat16 parameter.
        Variant("split", (), "bf16"),
    )
}
