"""Interleaved timing, and what it yields."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

_WARM_UP_ROUNDS = 3  # the first step makes state, the second is the first of the steady kind


class Contender(NamedTuple):
    """One way to take the step that is timed."""

    name: str
    step: Callable[[], object]
    bytes_moved: int | None = None
    """by one step, or None where that says nothing."""
    peer: str | None = None
    """the contender that does the same without us."""


class Absent(NamedTuple):
    """A contender that cannot run here, and why."""

    name: str
    reason: str


class Timing(NamedTuple):
    """How long one contender took, round by round."""

    contender: Contender
    seconds: Sequence[float]

    @property
    def name(self) -> str:
        """The contender's."""
        return self.contender.name

    @property
    def minimum(self) -> float:
        """Seconds of the fastest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)

    @property
    def gigabytes_per_second(self) -> float | None:
        """The traffic of the fastest round."""
        moved = self.contender.bytes_moved
        return None if moved is None else moved / self.minimum / 1e9

    def over(self, other: Timing) -> tuple[float, float]:
        """Minimum and median, each over the other's."""
        return self.minimum / other.minimum, self.median / other.median


class Report(NamedTuple):
    """The timings of one workload, its base first."""

    workload: str
    timings: Sequence[Timing]
    reference: str | None = None
    """the contender whose traffic is 100%."""
    notes: Sequence[str] = ()

    @property
    def base(self) -> Timing:
        """What all ratios are to."""
        return self.timings[0]

    def timing(self, name: str) -> Timing:
        """That of the contender of this name."""
        return next(timing for timing in self.timings if timing.name == name)


def time_interleaved(
    contenders: Sequence[Contender],
    rounds: int,
    before_step: Callable[[], None],
    *,
    lead: int = 0,
    limit: float = math.inf,
) -> list[Timing]:
    """Time the contenders in turn, round after round.

    What slows the machine for a while, such as another job, then slows all of them, and each
    finds the caches and torch's threads as the one before left them.

    Args:
        contenders: in the order in which they run.
        rounds: that are timed, after a few that are not.
        before_step: called before each step, untimed.
        lead: steps that a contender takes untimed in each of its turns, before the timed one.
        limit: seconds after which no further round starts.
    """
    seconds: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + limit
    gc.collect()
    gc.disable()
    try:
        for timed in [False] * _WARM_UP_ROUNDS + [True] * rounds:
            if seconds[0] and time.perf_counter() > end:
                break
            for contender, times in zip(contenders, seconds):
                for _ in range(lead):
                    before_step()
                    contender.step()
                before_step()
                start = time.perf_counter()
                contender.step()
                elapsed = time.perf_counter() - start
                if timed:
                    times.append(elapsed)
    finally:
        gc.enable()
    return list(map(Timing, contenders, seconds))
