"""How far outputs of whole models may be off: as far as roundings by chance move them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.tolerances.units import unit_roundoff


class Perturbed(TorchDispatchMode):
    """Runs a float64 computation with all the roundings that one in ``dtype`` may make.

    Over the fifty layers of a model, a bound on the worst case is too wide to be of use. Instead
    every operation's result is moved by the most that its own rounding can move it, up or down by
    chance:

    * by ``n u`` of the sum of the magnitudes for a sum of ``n`` products, in float32, in which
      16-bit ones are added up, and by ``u`` of ``dtype`` for storing it;
    * by ``4 u`` of ``dtype`` for everything else, which is what vectorized functions promise; of a
      BatchNorm's for each of its terms.

    Real roundings are smaller, and as independent of each other as chance. So the distance to the
    unperturbed result is more than the distance of a right result in ``dtype``.
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
    """What :func:`assert_as_exact` compares with, for more than one comparison."""
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
        results: to be judged.
        exact: computes them in float64, with weights and inputs that it rounds to nothing.
        dtype: of weights, inputs and operations.
    """
    right = exact if isinstance(exact, Exact) else computed_exactly(exact, dtype)
    for i, (result, output, allowed) in enumerate(zip(results, *right)):
        distance = torch.dist(result.double(), output).item()
        assert distance <= allowed, (
            f"output {i} is {distance:.3g} from the exact one, and {dtype} allows {allowed:.3g}"
        )
