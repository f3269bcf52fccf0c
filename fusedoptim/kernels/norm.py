"""The gradient's norm, for clipping: the squares of each chunk, summed."""

from __future__ import annotations

from fusedoptim.kernels.language import Grad, Index

__all__ = ["sum_of_squares"]


def sum_of_squares(i: Index, grad: Grad) -> tuple[float]:
    """Sum the squares of a gradient's elements."""
    g = grad[i]
    return (g * g,)
