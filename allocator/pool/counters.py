"""The counters of a pool: current values, peaks and sums of its blocks and segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from allocator.pool.allocation import Allocation

METRICS = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "active",
    "active_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
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

    def reset_peak(self) -> None:
        """Reset the peak to the current value."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Reset both sums to 0."""
        self.allocated = self.freed = 0

    def pass_through(self, amount: int) -> None:
        """Count a rise that follows an equal fall."""
        self.allocated += amount
        self.freed += amount


class Tally:
    """A pool's counters: each metric for all blocks, for large ones and for small ones."""

    def __init__(self) -> None:
        self.levels = {metric: tuple(Level() for _ in TIERS) for metric in METRICS}
        self._given = [self.levels[name] for name in METRICS[:3]]
        self._active = [self.levels[name] for name in METRICS[3:5]]
        self._reserved = [self.levels[name] for name in METRICS[5:7]]
        self._splits = [self.levels[name] for name in METRICS[7:]]
        self.misses = 0
        """allocations that needed the driver."""
        self.retries = 0
        """allocations that found no room at first and were retried."""
        self.ooms = 0
        """allocations that failed."""

    def allocated(self, size: int, requested: int, is_small: bool) -> None:
        """Count an allocation and its block."""
        self._rise(self._given, (1, size, requested), is_small)
        self._rise(self._active, (1, size), is_small)

    def released(self, size: int, requested: int, is_small: bool) -> None:
        """Count a release; another queue may still use the block."""
        self._fall(self._given, (1, size, requested), is_small)

    def freed(self, size: int, is_small: bool) -> None:
        """Count a block that may be allocated again."""
        self._fall(self._active, (1, size), is_small)

    def grew(self, size: int, is_small: bool) -> None:
        """Count a segment taken from the driver."""
        self._rise(self._reserved, (1, size), is_small)

    def shrank(self, size: int, is_small: bool) -> None:
        """Count a segment returned to the driver."""
        self._fall(self._reserved, (1, size), is_small)

    def reused(self, count: int, size: int, requested: int, is_small: bool) -> None:
        """Count allocations of one block that was released and allocated again ``count`` times."""
        metrics = [*self._given, *self._active]
        for levels, amount in zip(metrics, (1, size, requested, 1, size)):
            for level in (levels[0], levels[1 + is_small]):
                level.pass_through(count * amount)

    def recount(
        self, given: Iterable[Allocation], active: Iterable[Allocation], room: Mapping[bool, Split]
    ) -> None:
        """Set the current values after an interrupted call.

        Args:
            given: allocations in use.
            active: allocations whose blocks are not free.
            room: segments of large and of small blocks, by whether they are small.
        """
        for levels, of in (
            (self._given, [((1, a.size, a.nbytes), a.is_small) for a in given]),
            (self._active, [((1, a.size), a.is_small) for a in active]),
            (self._reserved, [(amounts, is_small) for is_small, amounts in room.items()]),
        ):
            for i, level in enumerate(levels):
                small = sum(amounts[i] for amounts, is_small in of if is_small)
                every = sum(amounts[i] for amounts, _ in of)
                for tier, amount in zip(level, (every, every - small, small)):
                    tier.become(amount)

    def set_splits(self, large: Split, small: Split) -> None:
        """Set the free blocks in partly used segments."""
        both = Split(large.blocks + small.blocks, large.nbytes + small.nbytes)
        for levels, amounts in zip(self._splits, zip(both, large, small)):
            for level, amount in zip(levels, amounts):
                level.become(amount)

    def reset_peaks(self) -> None:
        """Reset the peaks to the current values."""
        for by_tier in self.levels.values():
            for level in by_tier:
                level.reset_peak()

    def reset_accumulated(self) -> None:
        """Reset the sums and the counts to 0."""
        self.misses = self.retries = self.ooms = 0
        for by_tier in self.levels.values():
            for level in by_tier:
                level.reset_accumulated()

    @staticmethod
    def _rise(metrics: list[tuple[Level, ...]], amounts: tuple[int, ...], is_small: bool) -> None:
        for levels, amount in zip(metrics, amounts):
            levels[0].rise(amount)
            levels[1 + is_small].rise(amount)

    @staticmethod
    def _fall(metrics: list[tuple[Level, ...]], amounts: tuple[int, ...], is_small: bool) -> None:
        for levels, amount in zip(metrics, amounts):
            levels[0].fall(amount)
            levels[1 + is_small].fall(amount)


class Split(NamedTuple):
    """Free blocks in partly used segments."""

    blocks: int
    nbytes: int
