"""Advice: the rules that suit a recorded program best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from allocator.monitoring.replay import Replay
from allocator.pool.blocks import Rules
from allocator.runtime.formatting import as_html, as_text, escaped, size_text

if TYPE_CHECKING:
    from allocator.monitoring.trace import Trace

_KIB = 1 << 10
_MIB = 1 << 20
_KNOBS: dict[str, tuple[float, ...]] = {
    "slack": (0, 2 * _MIB, 32 * _MIB),
    "over_reserve": (0.0, 0.01, 0.1),
    "small_limit": (8 * _KIB, 512 * _KIB),
    "small_segment": (512 * _KIB, 8 * _MIB),
    "replace_limit": (_MIB, 4 * _MIB, 256 * _MIB),
    "replace_rest": (0.0, 1.0),
}
"""Values of :class:`Rules` that are tried besides the defaults."""
_MARGIN = 16


class Candidate(NamedTuple):
    """Rules, and the cost of the trace on a pool with them."""

    rules: Rules
    replay: Replay


@dataclass(frozen=True, repr=False)
class Advice:
    """How much memory a trace needs, and how much pools with various rules reserve for it.

    Made by :func:`advise`. It prints as a table, in a terminal and in a notebook.
    """

    tried: tuple[Candidate, ...]
    """All rules that were tried, best first."""
    default: Candidate
    """The default rules."""
    hit_rate: float
    """The hit rate that was asked for."""

    @property
    def lower_bound(self) -> int:
        """Most bytes requested at once: no pool needs less."""
        return self.default.replay.peak_requested

    @property
    def best(self) -> Candidate:
        """The rules that reserve least and reach the hit rate, or that come closest to it."""
        return self.tried[0]

    @property
    def rules(self) -> Rules:
        """The best rules, for ``Pool(rules=...)``."""
        return self.best.rules

    @property
    def limit(self) -> int:
        """The limit for ``Pool(limit=...)``: what the best rules reserve, plus one sixteenth."""
        peak = self.best.replay.peak_reserved
        return -(-(peak + peak // _MARGIN) // _MIB) * _MIB

    def __repr__(self) -> str:
        table = as_text(_HEADER, self._rows(), str.rjust)
        return "\n".join([self._bound(), table, self._cure()])

    def _repr_html_(self) -> str:
        return (
            f"<p>{escaped(self._bound())}</p>"
            f"{as_html(_HEADER, self._rows())}"
            f"<p>{escaped(self._cure())}</p>"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        others = (candidate for candidate in self._frontier() if candidate != self.default)
        return map(self._row, chain([self.default], others))

    def _frontier(self) -> Iterator[Candidate]:
        """Candidates that no other beats in both memory and hits, least memory first."""
        most_hits = -1
        for candidate in sorted(self.tried, key=lambda c: (c.replay.peak_reserved, -c.replay.hits)):
            if candidate.replay.hits > most_hits:
                most_hits = candidate.replay.hits
                yield candidate

    def _row(self, candidate: Candidate) -> tuple[str, ...]:
        rules, replay = candidate
        return (
            _rules_text(rules) + (" (best)" if rules == self.rules else ""),
            size_text(replay.peak_reserved),
            f"{replay.peak_reserved / self.lower_bound:.3f}" if self.lower_bound else "",
            f"{replay.hit_rate:.2%}",
            f"{replay.driver_calls:,}",
        )

    def _bound(self) -> str:
        allocations = self.default.replay.allocations
        return f"allocations: {allocations:,}; most in use at once: {size_text(self.lower_bound)}"

    def _cure(self) -> str:
        arguments = "" if self.rules == Rules() else "rules=advice.rules, "
        cure = f"Pool({arguments}limit='{self.limit // _MIB}MiB')"
        if self.best.replay.hit_rate < self.hit_rate:
            return f"{cure}; no rules reach {self.hit_rate:.2%} hits"
        return cure


_HEADER = ("", "reserved", "of the bound", "hits", "driver calls")


def advise(trace: Trace, *, hit_rate: float | None = None) -> Advice:
    """Find the rules that reserve least memory for a trace.

    The search is greedy: each rule is set to the best of a few values, keeping those found before.
    The best rules have the lowest peak of reserved bytes among those that reach the hit rate. The
    search also runs for hit rates of 0 and 1, so that a lower hit rate never needs more memory.
    This takes some forty replays, each of order n log n for n events.

    Args:
        trace: a program's trace, or that of some typical steps.
        hit_rate: share of the allocations that must not need the driver; that of the default rules
            if None. A lower one may save memory.

    Raises:
        ValueError: the trace has no allocation, or the hit rate is not in [0, 1].

    Example:
        >>> import allocator
        >>> pool = allocator.Pool("cpu")
        >>> with pool.record() as trace:
        ...     for n in range(4):
        ...         kept = pool.allocate(3_000_000 + n)
        >>> advice = allocator.advise(trace)
        >>> advice.lower_bound, advice.best.replay.peak_live
        (6000005, 6007808)
        >>> better = allocator.Pool("cpu", rules=advice.rules, limit=advice.limit)
        >>> trace.replay(better).peak_reserved == advice.best.replay.peak_reserved
        True
    """
    if not any(event.action == "allocate" and event.size for event in trace):
        raise ValueError("the trace has no allocation to give advice on")
    if hit_rate is not None and not 0 <= hit_rate <= 1:
        raise ValueError(f"hit_rate={hit_rate!r} is not in [0, 1]")
    default = Candidate(Rules(), trace.replay(Rules()))
    wanted = default.replay.hit_rate if hit_rate is None else hit_rate
    tried = sorted(_search(trace, default, wanted), key=lambda tried: _cost(tried, wanted))
    return Advice(tuple(tried), default, wanted)


def _search(trace: Trace, default: Candidate, hit_rate: float) -> list[Candidate]:
    """The candidates of a greedy search."""
    replays = {default.rules: default.replay}
    # A search for a lower hit rate occasionally ends at more memory than one for a higher rate.
    for aim in sorted({0.0, hit_rate, 1.0}):
        tried = [default]
        for knob, values in _KNOBS.items():
            rules = min(tried, key=lambda candidate: _cost(candidate, aim)).rules
            for value in values:
                other = replace(rules, **{knob: value})  # type: ignore[arg-type]  # of its own type
                if other not in replays:
                    replays[other] = trace.replay(other)
                tried.append(Candidate(other, replays[other]))
    return [Candidate(rules, replay) for rules, replay in replays.items()]


def _cost(candidate: Candidate, hit_rate: float) -> tuple[float, int, int]:
    """The sort key: what should be small, the most important first."""
    replay = candidate.replay
    missing = max(hit_rate - replay.hit_rate, 0)
    return missing, replay.peak_reserved, -replay.hits


def _rules_text(rules: Rules) -> str:
    """The differences from the default rules."""
    changes = []
    for field in fields(Rules):
        value = getattr(rules, field.name)
        if value != field.default:
            text = size_text(value) if isinstance(value, int) else f"{value:g}"
            changes.append(f"{field.name}={text}")
    return ", ".join(changes) or "default rules"
