"""How far a result may be from the float64 reference. All tolerances of the tests are derived here.

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

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ARITHMETIC = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
# Units u for a quotient and for a square root.
_QUOTIENT = {torch.float32: 5, torch.float64: 1}
_ROOT = {torch.float32: 6, torch.float64: 1}
_POWER = 4  # times the sum of our roundoff and the reference's
# Units in the last place, each 2 u, by which OpenCL C's functions of a float may be off (OpenCL C
# specification, "Relative Error as ULPs", full profile).
BUILTIN_ULPS = {"exp": 3, "log": 3, "sin": 4, "cos": 4, "tanh": 5, "erf": 16, "sqrt": 3, "pow": 16}
# CPU.shape of fusedoptim.launch.cpu: a lane adds up CHUNK / LANES terms of a chunk. A GPU's lane
# adds up fewer, but there are more lanes.
LANES = 16
CHUNK = 32 * 1024


@functools.cache
def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to ``dtype``."""
    return torch.finfo(dtype).eps / 2


@functools.cache
def both_roundoffs(dtype: torch.dtype) -> float:
    """Largest relative error of a rounding of kernels for ``dtype``, and of one in float64.

    A reference in float64 rounds as often as a kernel.
    """
    return unit_roundoff(ARITHMETIC[dtype]) + unit_roundoff(torch.float64)


def by_hand(expected: Any, roundings: int, dtype: torch.dtype = torch.float64) -> Any:
    """Compare with a number computed by hand, or a list of them, up to so many roundings.

    The kernels' arithmetic and the test's own expression may each round that often.
    """
    return pytest.approx(expected, rel=roundings * unit_roundoff(dtype), abs=0.0)


def additions(sizes: Sequence[int]) -> int:
    """The most additions that a term passes through in a sum over tensors of these sizes.

    A lane adds its terms of a chunk. Its sums of the chunks are added, at worst one after the
    other, and then those of the lanes.
    """
    chunks = sum(math.ceil(size / CHUNK) for size in sizes)
    return math.ceil(min(max(sizes, default=0), CHUNK) / LANES) + chunks + LANES


class Bounded:
    """Values in float64 and, for each, the most by which a kernel's may differ."""

    def __init__(self, value: Tensor, error: Tensor | float, arithmetic: torch.dtype) -> None:
        self.value = value
        if not isinstance(error, Tensor):
            error = torch.tensor(error, dtype=torch.float64)
        self.error = error if error.shape == value.shape else error.expand_as(value)
        self.arithmetic = arithmetic
        self._u = both_roundoffs(arithmetic)

    def split(self, shapes: Sequence[torch.Size]) -> list[Bounded]:
        """Cut the values, one after the other, into these shapes."""
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
        sizes = value.abs().add_(inherited)
        error = torch.add(inherited, sizes, alpha=units * self._u)
        error += torch.finfo(self.arithmetic).smallest_normal
        return Bounded(value, error, self.arithmetic)

    def _in(self, arithmetic: torch.dtype) -> Bounded:
        if self.arithmetic == arithmetic:
            return self
        return Bounded(self.value, self.error, arithmetic)._rounded(self.value, self.error)

    def _with(self, other: Bounded | float) -> tuple[Bounded, Bounded]:
        """Return both operands in the narrower of their arithmetics."""
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
        # The base is a number from the host, which is exact.
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
        # |sqrt(a + e) - sqrt(a)| is at most sqrt(e) and e / sqrt(a); fmin ignores 0 / 0.
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
    """The product of sizes, in which an exact zero times an infinite bound is zero."""
    product = a * b
    # That product is NaN, and then so is the sum; there is hardly ever one.
    if product.sum().isnan():
        product[(a == 0) | (b == 0)] = 0.0
    return product


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Bounded]] = {
    torch.sqrt: Bounded._sqrt,
    torch.maximum: Bounded._maximum,
    torch.clamp: Bounded._clamp,
    torch.linalg.vector_norm: Bounded._vector_norm,
}


def joined(parts: Sequence[Bounded]) -> Bounded:
    """Join values one after the other; :meth:`Bounded.split` separates them."""
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


def cross_entropy_errors(
    logits: Tensor, target: Tensor, smoothing: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The most by which the loss of each row, and the gradient of the loss's sum, may be off.

    Args:
        logits: (N, C), in float64, with values of ``dtype``.
        target: a class for each row.
        smoothing: of the labels.
        dtype: of the logits and their gradient; the kernels compute in its arithmetic dtype.
    """
    u = both_roundoffs(dtype)
    classes = logits.shape[1]
    sums = math.ceil(classes / LANES) + LANES  # additions that a term passes through
    largest = logits.max(1, keepdim=True).values
    p = torch.softmax(logits, 1)
    # A rounding of x - max is a relative error of its exponential.
    distances = (p * (largest - logits)).sum(1, keepdim=True)
    log_total = torch.logsumexp(logits - largest, 1, keepdim=True)
    off = u * (distances + sums + 2 * BUILTIN_ULPS["exp"])
    off = off + 2 * BUILTIN_ULPS["log"] * u * log_total

    of_class = logits.gather(1, target[:, None])
    loss = (largest - of_class).abs() + log_total
    mean = (largest - logits).mean(1, keepdim=True)
    spread = smoothing * (log_total + (sums + 2) * mean)
    loss_error = off + u * (3 * loss + 4 * spread)

    log_sum = largest + log_total
    relative = off + u * (log_sum.abs() + (logits - log_sum).abs() + 2 * BUILTIN_ULPS["exp"])
    wanted = smoothing / classes + (1 - smoothing) * (logits == of_class)
    error = relative * p + 4 * u * (p + wanted)
    stored = error + unit_roundoff(dtype) * (p + wanted + error) + torch.finfo(dtype).tiny
    return loss_error.squeeze(1), stored


def bag_errors(magnitudes: Tensor, terms: Tensor | int, dtype: torch.dtype) -> Tensor:
    """The most by which sums over the rows of a table, or their means, may be off.

    A product and a sum round once, by ``u`` of the sum so far, which is at most the sum of the
    magnitudes; a mean rounds its factor and the product by it.

    Args:
        magnitudes: the sums of the terms' magnitudes, in float64.
        terms: their number, at most.
        dtype: of the result.
    """
    units = (terms + 3) * both_roundoffs(dtype)
    error = units / (1 - units) * magnitudes
    return error + unit_roundoff(dtype) * (magnitudes + error) + torch.finfo(dtype).tiny


def interaction_errors(features: Tensor, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The most by which an interaction's products, and the features' gradients, may be off.

    Args:
        features: (B, n, d), in float64, with values of ``dtype``.
        grad: of the products, a symmetric matrix for each sample; the gradient of the output's
            first columns is one more term, of the size of its own.
        dtype: of the features; the kernels compute in its arithmetic dtype.
    """
    u, stored, tiny = (
        both_roundoffs(dtype),
        unit_roundoff(dtype),
        torch.finfo(dtype).tiny,
    )
    _, count, width = features.shape
    sizes = features.abs()

    def allowed(terms: int, total: Tensor) -> Tensor:
        return (terms * u + stored) * (1 + terms * u) * total + tiny

    return allowed(width, sizes @ sizes.mT), allowed(count, grad.abs() @ sizes)


def gelu_errors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The most by which GELU by tanh, and its derivative, may be off.

    Args:
        x: in float64, with values of ``dtype``.
        dtype: of the values; the kernels compute in its arithmetic dtype.
    """
    arithmetic = ARITHMETIC[dtype]
    u, tiny = both_roundoffs(dtype), torch.finfo(arithmetic).tiny
    slope = 2 * math.sqrt(2 / math.pi)
    exponent = slope * x * (1 + 0.044715 * x**2)
    sigma = torch.sigmoid(exponent)
    # Of e^-2u: six roundings of its exponent, and its own. 1 + e^-2u is 1 / sigma.
    off = (1 - sigma) * u * (6 * exponent.abs() + 2 * BUILTIN_ULPS["exp"])
    off = off + u * (1 + 5)  # _QUOTIENT, of float32
    value = x.abs() * sigma
    error = (off + u) * value + tiny * x.abs()
    factor = x.abs() * slope * (1 + 3 * 0.044715 * x**2)
    term = factor * sigma
    complement = sigma * off + u * (1 - sigma)
    of_term = term * (complement + (1 - sigma) * (off + 6 * u)) + tiny * (
        2 + factor
    )  # sigma may be flushed to zero
    of_slope = of_term + off * sigma + 2 * u * (term * (1 - sigma) + sigma)
    stored = (unit_roundoff(dtype) * (1 + off), torch.finfo(dtype).tiny)
    slopes = sigma + term * (1 - sigma)
    return (
        error + stored[0] * value + stored[1],
        of_slope + stored[0] * slopes + stored[1],
    )


def int8_errors(magnitudes: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The most by which a product of 8-bit codes may be off.

    Codes are multiplied and summed in integers, which rounds nothing. Then seven roundings to
    float32 are possible: of the sum, of the zero point's share in it and of their difference; of
    both scales' product, and by it; of the sum with the bias; and of the bias itself.

    Args:
        magnitudes: the sum of the products' magnitudes, with the zero point's, in float64.
        bias: broadcast to them.
        dtype: of the result.
    """
    sizes = magnitudes if bias is None else magnitudes + bias.abs()
    return (7 * unit_roundoff(torch.float32) + unit_roundoff(dtype)) * sizes


class Perturbed(TorchDispatchMode):
    """Runs a float64 computation with all the roundings that one in ``dtype`` may make.

    Over the fifty layers of a model, a bound on the worst case is too wide to be of use. Instead
    every operation's result is moved by the most that its own rounding can move it, up or down at
    random:

    * by ``n u`` of the sum of the magnitudes for a sum of ``n`` products, in float32, in which
      16-bit ones are added up, and by ``u`` of ``dtype`` for storing it;
    * by ``4 u`` of ``dtype`` for everything else, which is what vectorized functions promise; of a
      BatchNorm's for each of its terms.

    Real roundings are smaller, and just as independent of each other. So the distance to the
    unperturbed result is larger than that of a correct result in ``dtype``.
    """

    _PRODUCTS = ("convolution", "addmm", "mm", "bmm", "baddbmm", "mv", "dot")

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._u = unit_roundoff(dtype)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        if name in self._PRODUCTS:
            least = unit_roundoff(torch.float32)
            magnitudes = func(*map(_magnitude, args), **kwargs)
            return self._moved(result, self._terms(name, args) * least * magnitudes)
        if "batch_norm" in name:
            x, gamma, beta, mean, var = args[:5]
            scale = (var + args[-1]).rsqrt() * (1 if gamma is None else gamma.abs())
            terms = _by_channel(scale, x) * (x.abs() + _by_channel(mean.abs(), x))
            if beta is not None:
                terms = terms + _by_channel(beta.abs(), x)
            return (self._moved(result[0], 4 * self._u * terms), *result[1:])
        if func.is_view or not any(map(_is_real, tree_leaves(result))):
            return result
        if func._schema.is_mutable:
            target = args[0]
            if _is_real(target):
                target.copy_(self._moved(target, 3 * self._u * target.abs()))
            return result
        return tree_map(self._moved_by_units, result)

    def _moved_by_units(self, value: Any) -> Any:
        return self._moved(value, 3 * self._u * value.abs()) if _is_real(value) else value

    def _moved(self, value: Tensor, error: Tensor) -> Tensor:
        error = error + self._u * value.abs()
        moved = value + error * (torch.randint_like(value, 2) * 2 - 1)
        return torch.where(moved.isfinite(), moved, value)  # a mask's lowest number stays

    @staticmethod
    def _terms(name: str, args: Any) -> int:
        if name == "convolution":
            return args[1][0].numel() + 1 if not args[6] else args[1].numel() + 1
        return args[1].shape[0 if name == "addmm" else -1] + 1


def attention_errors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kept: Tensor,
    scale: float,
    grad: Tensor,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The most by which attention, and its gradients of query, key, value and scores, may be off.

    The bound is of first order: products of two roundings are far below its own slack.

    Args:
        query: (..., L, E), in float64, with values of ``dtype``, like all tensors.
        key: (..., S, E).
        value: (..., S, V).
        mask: added to the scores.
        kept: the factor of each weight in dropout.
        scale: of the scores.
        grad: of the output.
        dtype: of the tensors, and of the matrices of weights and of their gradients.
    """
    u, real = unit_roundoff(dtype), unit_roundoff(ARITHMETIC[dtype])
    rows, columns = kept.shape[-2:]
    # A sum of products in any order, and the factors' own roundings by scale and dropout.
    sums = (max(rows, columns, query.shape[-1], value.shape[-1]) + 3) * real
    scores, sizes = scale * query @ key.mT, abs(scale) * query.abs() @ key.abs().mT
    if mask is not None:
        scores, sizes = scores + mask, sizes + mask.abs().nan_to_num(posinf=0.0)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    distances = (scores.amax(-1, keepdim=True) - scores).nan_to_num(posinf=0.0) * (weights > 0)
    # A rounding of a score is a relative error of its exponential, and of the sum of them.
    of_scores = sums * sizes.amax(-1, keepdim=True) + real * distances.amax(-1, keepdim=True)
    of_weights = 2 * of_scores + sums + 4 * BUILTIN_ULPS["exp"] * real + u
    dropped = weights * kept
    output = dropped @ value.abs() * (of_weights + sums + 2 * u)
    of_value = (dropped * (of_weights + sums + 2 * u)).mT @ grad.abs()
    of_products = kept * (grad.abs() @ value.abs().mT)
    total = weights * (of_products + (weights * of_products).sum(-1, keepdim=True))
    of_scores = total * (2 * of_weights + 2 * sums + 4 * u)
    of_query = abs(scale) * (of_scores + total * (sums + u)) @ key.abs()
    of_key = abs(scale) * (of_scores + total * (sums + u)).mT @ query.abs()
    smallest = torch.finfo(dtype).smallest_normal  # what lies below it may become zero
    return [error + smallest for error in (output, of_query, of_key, of_value, of_scores)]


def _magnitude(value: Any) -> Any:
    return value.abs() if _is_real(value) else value


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


class Exact(NamedTuple):
    """Outputs in float64, and how far from them those of a narrower dtype may be."""

    outputs: Sequence[Tensor]
    allowed: list[float]


def computed_exactly(exact: Callable[[], Sequence[Tensor]], dtype: torch.dtype) -> Exact:
    """Compute what :func:`assert_as_exact` compares with, once for several comparisons."""
    expected = exact()
    draws = []
    for _ in range(3):
        with Perturbed(dtype):
            draws.append(exact())
    distances = ([torch.dist(*pair).item() for pair in zip(draw, expected)] for draw in draws)
    return Exact(expected, list(map(max, zip(*distances))))


def assert_as_exact(
    results: Sequence[Tensor], exact: Callable[[], Sequence[Tensor]] | Exact, dtype: torch.dtype
) -> None:
    """Assert that ``results``, computed in ``dtype``, are right.

    Args:
        results: to be checked.
        exact: computes them in float64, with weights and inputs that it does not round.
        dtype: of weights, inputs and operations.
    """
    right = exact if isinstance(exact, Exact) else computed_exactly(exact, dtype)
    for i, (result, output, allowed) in enumerate(zip(results, *right)):
        distance = torch.dist(result.double(), output).item()
        assert distance <= allowed, (
            f"output {i} is {distance:.3g} from the exact one, and {dtype} allows {allowed:.3g}"
        )


def rounding_step(value: Tensor, fraction: int, smallest: Tensor | float) -> Tensor:
    """The distance between the two numbers around ``value`` in a format.

    Stochastic rounding takes one of the two, so it is off by less than this.

    Args:
        value: to be rounded.
        fraction: bits after the binary point.
        smallest: normal number, below which the distance stays the same.
    """
    _, exponent = torch.frexp(torch.maximum(value.abs(), torch.as_tensor(smallest).to(value)))
    return torch.ldexp(torch.ones_like(value), exponent - 1 - fraction)


def binomial_bound(n: int, p: float) -> float:
    """How far the count of ``n`` independent events of probability ``p`` may be from ``n p``.

    Bernstein's inequality: the probability of a larger distance is at most ``2 exp(-L)``, here
    1e-7.
    """
    log = math.log(2e7)
    return log / 3 + math.sqrt(log * log / 9 + 2 * n * p * (1 - p) * log)


def roi_align_error(magnitudes: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """The most by which ROIAlign, or its gradient, may be off where its weights are exact.

    A weight is a product of two; a sum of products in any order rounds each term ``terms`` times.

    Args:
        magnitudes: the same result for absolute values, in float64.
        terms: the most that are added up.
        dtype: of maps and results.
    """
    u = unit_roundoff(ARITHMETIC[dtype])
    error = (terms + 4) * u * magnitudes
    if dtype != ARITHMETIC[dtype]:
        error = error + unit_roundoff(dtype) * (magnitudes + error)
    return error + torch.finfo(dtype).smallest_normal


def roi_align_position_error(largest: float, reach: float, dtype: torch.dtype) -> float:
    """The most by which ROIAlign may be off for any bins, in maps of values up to ``largest``.

    A position is off by eight roundings of numbers up to ``reach``, and so is each of the four
    weights of a sample; no sample is where the weights jump.
    """
    u = unit_roundoff(ARITHMETIC[dtype])
    return largest * u * (4 * 8 * reach + 64)
