r"""GELU by its approximation with a hyperbolic tangent, and its gradient.

.. math::
    u &= \sqrt{2/\pi}\,(x + 0.044715\,x^3) \\
    y &= \tfrac12 x\,(1 + \tanh u) = x\,\sigma, \qquad \sigma = \frac{1}{1 + e^{-2u}} \\
    \frac{\partial y}{\partial x} &= \sigma + 2 x\,\sigma\,(1-\sigma)\,\frac{\partial u}{\partial x}

Semantics: ``torch.nn.functional.gelu(x, approximate="tanh")`` of torch 2.13. Source: Hendrycks and
Gimpel, "Gaussian Error Linear Units" (2016).
"""

from __future__ import annotations

import math

from fusedoptim.kernels.language import Index, Input, Output, fma, real

__all__ = ["gelu_tanh", "gelu_tanh_backward"]

_SLOPE = -2 * math.sqrt(2 / math.pi)
"""The slope of -2u at x = 0."""
_CUBE = 0.044715


def gelu_tanh(i: Index, x: Input, y: Output) -> None:
    """Compute one element."""
    value = x[i]
    y[i] = value * (real(1) / (real(1) + math.exp(exponent(value, value * value))))


def gelu_tanh_backward(i: Index, x: Input, grad: Input, grad_x: Output) -> None:
    """Compute one element of the input's gradient."""
    value = x[i]
    square = value * value
    sigma = real(1) / (real(1) + math.exp(exponent(value, square)))
    slope = real(-_SLOPE) * fma(square, real(3 * _CUBE), real(1))
    grad_x[i] = grad[i] * fma(value * slope * sigma, real(1) - sigma, sigma)


def exponent(value: float, square: float) -> float:
    """The exponent -2u."""
    return value * (real(_SLOPE) * fma(square, real(_CUBE), real(1)))
