"""Values with bounds on how far a kernel's may be from them, which each operation propagates.

The bound is computed along with the result (running error analysis: Higham, "Accuracy and
Stability of Numerical Algorithms", section 3.3). The reference's own formula, from
``tests/references``, is evaluated on :class:`Bounded` values: each has the reference's value and a
bound, element by element, on how far a kernel's may be from it. An operation propagates the bounds
of its operands by an exact inequality, and adds its own rounding:

* half a unit in the last place, ``u``, for sums and products, and for a number that the host
  computed in float64, where it enters;
* in float32, 2.5 units (``5 u``) for a quotient and 3 units (``6 u``) for a square root, which is
  what OpenCL promises, full profile; in float64 both are rounded correctly;
* ``k u`` for a sum of positive terms in which each passes through at most ``k`` additions;
* the smallest normal number, as a device may flush what is below to zero;
* for a stored 16-bit parameter, ``u`` of its own dtype, and half of its smallest subnormal.

Hyper-parameters are Bounded values in float64, so the host's computations are bounded in the same
way. A power is off by up to 4 units (``8 u``), as numpy's may be; ``1 - b^t`` magnifies
that, most of all in the first steps. The reference rounds too: each ``u`` includes that of float64.

The kernels do no operation that the formulas lack: they fuse a product and a sum, which saves a
rounding, or combine numbers on the host, which saves more. Two are arranged differently. The host
takes the root of ``1 - b^t`` as a power, whose units vanish beside those of ``b^t``.
And for Adam's ``m' = b m + (1-b) g``, which errs by at most ``u (2 b |m| + 2 (1-b) |g| + |m'|)``,
the kernel computes ``m + (1-b) (g-m)`` if ``b > 1/2`` and ``g + b (m-g)`` otherwise. With ``w`` for
``1-b`` or ``b``, it rounds ``w`` and the difference, and the fused multiply-add once: it errs by at
most ``u (2 w (|m| + |g|) + |m'|)``. As ``w`` is the smaller of ``b`` and ``1-b``, this is no more.

Where a divisor may be zero within its bound, the quotient's bound is infinite. No gradient is tiny
(``helpers.random_like``), but weight decay may cancel one, about once in a million elements where
clipping has made the gradients as small as the decay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.tolerances.units import additions, unit_roundoff

# Units u for a quotient and for a square root.
_QUOTIENT = {torch.float32: 5, torch.float64: 1}
_ROOT = {torch.float32: 6, torch.float64: 1}
_POWER = 4  # of the units that ours and the reference's have together


class Bounded:
    """Values in float64 and, for each, the most by which a kernel's may differ."""

    def __init__(self, value: Tensor, error: Tensor | float, arithmetic: torch.dtype) -> None:
        self.value = value
        self.error = torch.as_tensor(error, dtype=torch.float64).expand_as(value)
        self.arithmetic = arithmetic
        self._u = unit_roundoff(arithmetic) + unit_roundoff(torch.float64)

    def split(self, shapes: Sequence[torch.Size]) -> list[Bounded]:
        """The values one after the other, in these shapes."""
        sizes = [shape.numel() for shape in shapes]
        parts = zip(self.value.flatten().split(sizes), self.error.flatten().split(sizes), shapes)
        return [Bounded(v.view(s), e.view(s), self.arithmetic) for v, e, s in parts]

    def stored(self, dtype: torch.dtype) -> Bounded:
        """The value as stored in a parameter of ``dtype``."""
        if dtype not in (torch.bfloat16, torch.float16):
            return self
        u = unit_roundoff(dtype)
        error = self.error + u * (self.value.abs() + self.error)
        error = error + u * torch.finfo(dtype).smallest_normal  # half of the smallest subnormal
        return Bounded(self.value, error, self.arithmetic)

    def _rounded(self, value: Tensor, inherited: Tensor, units: float = 1) -> Bounded:
        """The result of an operation, whose operands' errors propagate to ``inherited``."""
        error = inherited + units * self._u * (value.abs() + inherited)
        error = error + torch.finfo(self.arithmetic).smallest_normal
        return Bounded(value, error, self.arithmetic)

    def _in(self, arithmetic: torch.dtype) -> Bounded:
        if self.arithmetic == arithmetic:
            return self
        return Bounded(self.value, self.error, arithmetic)._rounded(self.value, self.error)

    def _with(self, other: Bounded | float) -> tuple[Bounded, Bounded]:
        """Both operands in the arithmetic of the narrower."""
        if not isinstance(other, Bounded):
            other = number(other)
        narrower = min(self.arithmetic, other.arithmetic, key=lambda dtype: dtype.itemsize)
        return self._in(narrower), other._in(narrower)

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error, self.arithmetic)

    def __add__(self, other: Bounded | float) -> Bounded:
        a, b = self._with(other)
        return a._rounded(a.value + b.value, a.error + b.error)

    def __sub__(self, other: Bounded | float) -> Bounded:
        return self + -other

    def __rsub__(self, other: float) -> Bounded:
        return -self + other

    def __mul__(self, other: Bounded | float) -> Bounded:
        a, b = self._with(other)
        inherited = _product(a.value.abs(), b.error) + _product(a.error, b.value.abs() + b.error)
        return a._rounded(a.value * b.value, inherited)

    __radd__, __rmul__ = __add__, __mul__

    def __truediv__(self, other: Bounded | float) -> Bounded:
        # (a + e) / (b + f) - a / b = (e - (a / b) f) / (b + f)
        a, b = self._with(other)
        value = a.value / b.value
        least = (b.value.abs() - b.error).clamp(min=0)
        inherited = (a.error + _product(value.abs(), b.error)) / least
        inherited = torch.where(least > 0, inherited, math.inf)
        return a._rounded(value, inherited, _QUOTIENT[a.arithmetic])

    def __rtruediv__(self, other: float) -> Bounded:
        return number(other) / self

    def __pow__(self, exponent: int) -> Bounded:
        # Of a number from the host, which is exact.
        return self._rounded(self.value**exponent, 0 * self.error, _POWER)

    def __eq__(self, other: object) -> bool:
        return all(value == other for value in self.value.flatten().tolist())

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Bounded:
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def _sqrt(self) -> Bounded:
        # |sqrt(a + e) - sqrt(a)| is at most sqrt(e) and e / sqrt(a); fmin passes over 0 / 0.
        value = self.value.sqrt()
        inherited = torch.fmin(self.error / value, self.error.sqrt())
        return self._rounded(value, inherited, _ROOT[self.arithmetic])

    def _maximum(self, other: Bounded) -> Bounded:
        error = torch.maximum(self.error, other.error)
        return Bounded(torch.maximum(self.value, other.value), error, self.arithmetic)

    def _clamp(self, *, max: Bounded | float) -> Bounded:  # noqa: A002 (torch's)
        exact = torch.as_tensor(max, dtype=torch.float64) if isinstance(max, float) else None
        bound = self._with(max)[1] if exact is None else Bounded(exact, 0.0, self.arithmetic)
        least, value, most = (
            torch.minimum(self.value + sign * self.error, bound.value + sign * bound.error)
            for sign in (-1, 0, 1)
        )
        return Bounded(value, torch.maximum(value - least, most - value), self.arithmetic)

    def _vector_norm(self, sizes: Sequence[int] | None = None) -> Bounded:
        # The norm of the errors is the most that they can add. The sum of squares is then off by a
        # factor of at most 1 + g with g = k u / (1 - k u), its root by one of at most 1 + g / 2.
        value = torch.linalg.vector_norm(self.value)
        inherited = torch.linalg.vector_norm(self.error)
        k = 1 + additions([self.value.numel()] if sizes is None else sizes)
        relative = k * self._u / (1 - k * self._u) / 2
        inherited = inherited + relative * (value + inherited)
        return self._rounded(value, inherited, _ROOT[self.arithmetic])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product; of an exact zero and an infinite bound, zero."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Bounded]] = {
    torch.sqrt: Bounded._sqrt,
    torch.maximum: Bounded._maximum,
    torch.clamp: Bounded._clamp,
    torch.linalg.vector_norm: Bounded._vector_norm,
}


def joined(parts: Sequence[Bounded]) -> Bounded:
    """Values one after the other, which :meth:`Bounded.split` separates."""
    value = torch.cat([part.value.flatten() for part in parts])
    error = torch.cat([part.error.flatten() for part in parts])
    return Bounded(value, error, parts[0].arithmetic)


def number(value: float) -> Bounded:
    """A number on the host."""
    return Bounded(torch.tensor(float(value), dtype=torch.float64), 0.0, torch.float64)


def clipping(grads: Sequence[Tensor], max_norm: float, arithmetic: torch.dtype) -> Bounded:
    """One, with the relative error of the factor by which ``max_grad_norm`` scales these gradients.

    ``arithmetic`` is the narrowest of the parameters, in which the norm is computed.
    """
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    norm = Bounded(flat, 0.0, arithmetic)._vector_norm([grad.numel() for grad in grads])
    factor = (max_norm / (norm + 1e-6))._clamp(max=1.0)
    return Bounded(torch.ones_like(factor.value), factor.error / factor.value, arithmetic)
