"""Interleaved timing and its results."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fusedoptim.runtime import keep_memory, release_memory

_WARM_UP_ROUNDS = 3  # the first step creates state, and the second may still differ from later ones


class Contender(NamedTuple):
    """One implementation of the step that is timed."""

    name: str
    step: Callable[[], object]
    bytes_moved: int | None = None
    """Bytes that one step moves, or None if that is meaningless."""
    peer: str | None = None
    """Name of the contender that does the same without fusedoptim."""


class Absent(NamedTuple):
    """A contender that cannot run here, and the reason."""

    name: str
    reason: str


class Timing(NamedTuple):
    """The times of one contender, round by round."""

    name: str
    """Name of the contender, whose step is not kept: it holds models and their memory."""
    seconds: Sequence[float]
    bytes_moved: int | None = None
    peer: str | None = None

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
        """Memory traffic of the fastest round."""
        moved = self.bytes_moved
        return None if moved is None else moved / self.minimum / 1e9

    def over(self, other: Timing) -> tuple[float, float]:
        """Return the ratios of the minima and of the medians."""
        return self.minimum / other.minimum, self.median / other.median


class Report(NamedTuple):
    """The timings of one workload, the base first."""

    workload: str
    timings: Sequence[Timing]
    reference: str | None = None
    """Name of the contender whose traffic counts as 100%."""
    notes: Sequence[str] = ()

    @property
    def base(self) -> Timing:
        """The timing that all ratios are relative to."""
        return self.timings[0]

    def timing(self, name: str) -> Timing:
        """Return the timing of the named contender."""
        return next(timing for timing in self.timings if timing.name == name)


def time_interleaved(
    contenders: Sequence[Contender],
    rounds: int,
    before_step: Callable[[], None] = lambda: None,
    *,
    lead: int = 0,
    limit: float = math.inf,
) -> list[Timing]:
    """Time the contenders interleaved, round after round.

    Other load, such as another job, then slows all of them. Each contender finds the caches and
    torch's threads in the state that the previous one left.

    Args:
        contenders: contenders in the order in which they run.
        rounds: number of timed rounds, after a few untimed ones.
        before_step: function that is called before each step, untimed.
        lead: number of untimed steps before each timed one.
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
    return [Timing(c.name, s, c.bytes_moved, c.peer) for c, s in zip(contenders, seconds)]


def time_with_kept_memory(contenders: Sequence[Contender], rounds: int) -> list[Timing]:
    """Time the contenders interleaved, while malloc keeps freed memory."""
    keep_memory()
    try:
        return time_interleaved(contenders, rounds)
    finally:
        release_memory()


def repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that makes ``times`` calls."""

    def run() -> None:
        for _ in range(times):
            call()

    return run


def powers_up_to(most: int) -> list[int]:
    """1, 2, 4 and so on."""
    return [2**i for i in range(most.bit_length())]
