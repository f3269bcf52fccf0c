"""Finds the range of an activation's values that get codes, from calibration batches.

Values beyond the range are clipped. A narrower range has finer steps, so it may be better to clip a
few values than to round all of them coarsely.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from transforms.rewrites.int8 import Range
from transforms.rewrites.int8_operators import code_bits

_BINS = 2048
_PERCENTILE = 0.9999
_CANDIDATES = 64
"""Ends of a range that are tried, on each side of zero."""


class Observer(Protocol):
    """Sees an activation, batch after batch."""

    def add(self, x: Tensor) -> None:
        """See finite values, at least one."""
        ...

    def range(self) -> Range:
        """The range of values that get codes."""
        ...


class MinMax:
    """From the smallest to the largest value: clips none."""

    def __init__(self) -> None:
        self._low, self._high = torch.inf, -torch.inf

    def add(self, x: Tensor) -> None:
        """See values."""
        low, high = torch.aminmax(x.detach())
        self._low, self._high = min(self._low, low.item()), max(self._high, high.item())

    def range(self) -> Range:
        """The smallest and the largest value."""
        return Range(self._low, self._high)


class _Histogram:
    """Counts of the values in bins of equal width, from the smallest value to the largest and 0."""

    def __init__(self) -> None:
        self._extremes = MinMax()
        self._counts = torch.zeros(_BINS, dtype=torch.float64)
        self._span = Range(0.0, 0.0)
        self._rounded = 0
        """How many values are not 0, whose code is exact."""

    def add(self, x: Tensor) -> None:
        """Count values."""
        values = x.detach().float().flatten()
        self._extremes.add(values)
        self._rounded += int(values.count_nonzero())
        low, high = self._extremes.range()
        span = Range(min(low, 0.0), max(high, 0.0))
        if span != self._span:
            self._counts = self._spread_over(span)
            self._span = span
        if span.low < span.high:
            self._counts += torch.histc(values, _BINS, *span)

    def _spread_over(self, span: Range) -> Tensor:
        """The counts in the bins of a wider range: each goes where the middle of its bin is."""
        counts = torch.zeros(_BINS, dtype=torch.float64)
        if self._span.low < self._span.high:
            places = (self._middles() - span.low) / (span.high - span.low) * _BINS
            counts.index_add_(0, places.long().clamp_(0, _BINS - 1), self._counts)
        return counts

    def _middles(self) -> Tensor:
        """The middle of each bin."""
        low, high = self._span
        return low + (torch.arange(_BINS, dtype=torch.float64) + 0.5) * ((high - low) / _BINS)


class Percentile(_Histogram):
    """Clips values on both sides so that 99.99 percent have codes; zero always has one."""

    def range(self) -> Range:
        """The percentiles of the values."""
        low, high = self._span
        shares = self._counts.cumsum(0) / self._counts.sum().clamp_(min=1)
        width = (high - low) / _BINS
        first = int(torch.searchsorted(shares, (1 - _PERCENTILE) / 2, right=True))
        last = int(torch.searchsorted(shares, (1 + _PERCENTILE) / 2))
        ends = low + first * width, low + (min(last, _BINS - 1) + 1) * width
        return Range(max(low, min(ends[0], 0.0)), min(high, max(ends[1], 0.0)))


class LeastError(_Histogram):
    """The range whose codes have the least mean squared error.

    An error is rounding, uniform over a step, or the distance of a clipped value from the range.
    """

    def range(self) -> Range:
        """The best of some thousand ranges that contain zero."""
        low, high = self._span
        fractions = torch.arange(1, _CANDIDATES + 1, dtype=torch.float64) / _CANDIDATES
        lows = fractions * low if low < 0 else torch.zeros(1, dtype=torch.float64)
        highs = fractions * high if high > 0 else torch.zeros(1, dtype=torch.float64)
        clipped = self._clipped_below(lows)[:, None] + self._clipped_above(highs)[None]
        steps = (highs[None] - lows[:, None]) / (2 ** code_bits() - 1)
        errors = clipped + self._rounded * steps**2 / 12
        best = divmod(int(errors.argmin()), len(highs))
        return Range(lows[best[0]].item(), highs[best[1]].item())

    def _clipped_above(self, ends: Tensor) -> Tensor:
        """The sum of the squared errors of values above each end."""
        beyond = (self._middles()[None] - ends[:, None]).clamp_(min=0)
        return beyond.square_() @ self._counts

    def _clipped_below(self, ends: Tensor) -> Tensor:
        """The sum of the squared errors of values below each end."""
        beyond = (ends[:, None] - self._middles()[None]).clamp_(min=0)
        return beyond.square_() @ self._counts


OBSERVERS: dict[str, type[MinMax] | type[Percentile] | type[LeastError]] = {
    "min-max": MinMax,
    "percentile": Percentile,
    "mse": LeastError,
}
"""The observer for each value of ``ranges``."""
