"""The dtypes of parameters, and what follows from each: the one table of them.

Every kernel is compiled once for each :class:`Variant`. Tensors' dtypes are named by strings, so
that the table can be read where torch cannot be imported.
"""

from __future__ import annotations

from typing import NamedTuple


class Variant(NamedTuple):
    """One variant of every kernel."""

    name: str
    """As in the names of compiled kernels, such as "adam_bf16"."""
    params: tuple[str, ...]
    """torch's dtypes of the parameters it updates."""
    element: str
    """How values of the parameter's dtype are stored (see :mod:`fusedoptim.kernels._lowering`)."""
    arithmetic: str
    """The dtype of arithmetic and of optimizer state, by the name that torch and numpy share."""


VARIANTS = {
    variant.name: variant
    for variant in (
        # A complex number is two real ones, which every elementwise update treats alike.
        Variant("f32", ("float32", "complex64"), "f32", "float32"),
        Variant("f64", ("float64", "complex128"), "f64", "float64"),
        Variant("bf16", ("bfloat16",), "bf16", "float32"),
        Variant("f16", ("float16",), "f16", "float32"),
        # Float32 values in two halves, of which the upper is the bfloat16 parameter.
        Variant("split", (), "bf16", "float32"),
    )
}
