"""The counters of a pool: current values, peaks and sums of its blocks and segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

ALLOCATIONS = ("allocation", "allocated_bytes", "requested_bytes")
BLOCKS = ("active", "active_bytes")
SEGMENTS = ("segment", "reserved_bytes")
INACTIVE = ("inactive_split", "inactive_split_bytes")
METRICS = (*ALLOCATIONS, *BLOCKS, *SEGMENTS, *INACTIVE)
"""All metrics, by torch's names."""
TIERS = ("all", "large_pool", "small_pool")
FACTS = ("current", "peak", "allocated", "freed")


class Level:
    """A quantity that rises and falls."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.allocated = 0
        """sum of all rises."""
        self.freed = 0
        """sum of all falls."""

    def rise(self, amount: int) -> None:
        """Add an amount."""
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def fall(self, amount: int) -> None:
        """Subtract an amount."""
        self.freed += amount
        self.current -= amount

    def become(self, amount: int) -> None:
        """Rise or fall to ``amount``."""
        if amount > self.current:
            self.rise(amount - self.current)
        else:
            self.fall(self.current - amount)

    def pass_through(self, amount: int) -> None:
        """Count a rise that follows an equal fall."""
        self.allocated += amount
        self.freed += amount


class Counters:
    """A pool's counters: each metric for all blocks, for large ones and for small ones."""

    def __init__(self) -> None:
        self.levels = {metric: tuple(Level() for _ in TIERS) for metric in METRICS}
        """the levels of each metric, one for each of :data:`TIERS`."""
        self.misses = 0
        """allocations that needed the driver."""
        self.retries = 0
        """allocations that found no room at first and were retried."""
        self.ooms = 0
        """allocations that failed."""

    def allocated(self, size: int, requested: int, is_small: bool) -> None:
        """Count an allocation and its block."""
        self._change(Level.rise, ALLOCATIONS, (1, size, requested), is_small)
        self._change(Level.rise, BLOCKS, (1, size), is_small)

    def released(self, size: int, requested: int, is_small: bool) -> None:
        """Count a release; another queue may still use the block."""
        self._change(Level.fall, ALLOCATIONS, (1, size, requested), is_small)

    def freed(self, size: int, is_small: bool) -> None:
        """Count a block that may be allocated again."""
        self._change(Level.fall, BLOCKS, (1, size), is_small)

    def grew(self, size: int, is_small: bool) -> None:
        """Count a segment taken from the driver."""
        self._change(Level.rise, SEGMENTS, (1, size), is_small)

    def shrank(self, size: int, is_small: bool) -> None:
        """Count a segment returned to the driver."""
        self._change(Level.fall, SEGMENTS, (1, size), is_small)

    def reused(self, count: int, size: int, requested: int, is_small: bool) -> None:
        """Count allocations of one block that was released and allocated again ``count`` times."""
        amounts = (count, count * size, count * requested)
        self._change(Level.pass_through, ALLOCATIONS, amounts, is_small)
        self._change(Level.pass_through, BLOCKS, amounts[:2], is_small)

    def recount(self, metrics: Sequence[str], items: Iterable[tuple[Sequence[int], bool]]) -> None:
        """Set metrics to the sums of items: an amount for each metric, and whether it is small."""
        large, small = [0] * len(metrics), [0] * len(metrics)
        for amounts, is_small in items:
            totals = small if is_small else large
            totals[:] = [a + b for a, b in zip(totals, amounts, strict=True)]
        for metric, *by_tier in zip(metrics, map(int.__add__, large, small), large, small):
            for level, amount in zip(self.levels[metric], by_tier):
                level.become(amount)

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values."""
        for by_tier in self.levels.values():
            for level in by_tier:
                level.peak = level.current

    def reset_accumulated(self) -> None:
        """Reset the sums and the counts to 0."""
        self.misses = self.retries = self.ooms = 0
        for by_tier in self.levels.values():
            for level in by_tier:
                level.allocated = level.freed = 0

    def _change(
        self,
        change: Callable[[Level, int], None],
        metrics: Sequence[str],
        amounts: Sequence[int],
        is_small: bool,
    ) -> None:
        for metric, amount in zip(metrics, amounts, strict=True):
            levels = self.levels[metric]
            change(levels[0], amount)
            change(levels[1 + is_small], amount)
