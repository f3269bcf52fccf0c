"""Results of chance: numbers that are rounded up or down at random, and counts of events."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rounding_step(value: Tensor, fraction: int, smallest: Tensor | float) -> Tensor:
    """The distance of the two numbers around ``value`` in a format.

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

    Bernstein's inequality: the probability to be farther is at most ``2 exp(-L)``, here 1e-7.
    """
    log = math.log(2e7)
    return log / 3 + math.sqrt(log * log / 9 + 2 * n * p * (1 - p) * log)
