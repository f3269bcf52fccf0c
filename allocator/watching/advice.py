"""What a recorded program could do with its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

from allocator.pool.blocks import Rules
from allocator.pool.sizes import size_text
from allocator.watching.plan import Plan, planned
from allocator.watching.replay import Replay
from allocator.watching.tables import as_html, as_text, escaped

if TYPE_CHECKING:
    from allocator.watching.trace import Trace

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
"""The values of :class:`Rules` that are tried besides the default ones."""
_MARGIN = 16


class Candidate(NamedTuple):
    """Rules, and what the trace cost a pool of theirs."""

    rules: Rules
    replay: Replay


@dataclass(frozen=True, repr=False)
class Advice:
    """How much memory a trace needs, and what a pool would take for it.

    Made by :func:`advise`. It prints as a table, in a terminal and in a notebook.
    """

    tried: tuple[Candidate, ...]
    """Rules, best first."""
    default: Candidate
    """The default rules."""
    hit_rate: float
    """That was asked for."""
    plan: Plan
    """A place for each allocation in one piece of memory."""

    @property
    def lower_bound(self) -> int:
        """The most bytes in use at once, as they were asked for: no pool needs less."""
        return self.default.replay.peak_requested

    @property
    def best(self) -> Candidate:
        """What reserves least of all that reach the hit rate; if none does, what comes closest."""
        return self.tried[0]

    @property
    def rules(self) -> Rules:
        """The best ones, for ``Pool(rules=...)``."""
        return self.best.rules

    @property
    def limit(self) -> int:
        """For ``Pool(limit=...)``: what the best rules reserve, and a sixteenth for chance."""
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
        yield self._row("a static plan", self.plan.peak, "", "1")
        yield self._candidate_row(self.default)
        for candidate in self._frontier():
            if candidate != self.default:
                yield self._candidate_row(candidate)

    def _frontier(self) -> Iterator[Candidate]:
        """Those that no other beats in both memory and hits, the least memory first."""
        most_hits = -1
        for candidate in sorted(self.tried, key=lambda c: (c.replay.peak_reserved, -c.replay.hits)):
            if candidate.replay.hits > most_hits:
                most_hits = candidate.replay.hits
                yield candidate

    def _candidate_row(self, candidate: Candidate) -> tuple[str, ...]:
        rules, replay = candidate
        mark = " (best)" if rules == self.rules else ""
        hits, calls = f"{replay.hit_rate:.2%}", f"{replay.driver_calls:,}"
        return self._row(_rules_text(rules) + mark, replay.peak_reserved, hits, calls)

    def _row(self, name: str, peak: int, hits: str, calls: str) -> tuple[str, ...]:
        ratio = f"{peak / self.lower_bound:.3f}" if self.lower_bound else ""
        return name, size_text(peak), ratio, hits, calls

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
    """Try a trace on other rules, and plan it.

    The rules are found knob by knob: each is set to the best of a few values, with those before
    it as they were found. Best is what reserves least at its peak, of those that reach the hit
    rate. The same is done for a hit rate of 0 and of 1, so that asking for less never takes more
    than asking for all. That is some forty replays of the order n log n for n events, and a plan of
    n².

    Args:
        trace: of a program, or of some typical steps of it.
        hit_rate: the part of the allocations that shall not need the driver; that of the default
            rules if None. Less may save memory.

    Raises:
        ValueError: the trace has no allocation, or the hit rate is not in [0, 1].

    Example:
        >>> import allocator
        >>> pool = allocator.Pool("cpu")
        >>> with pool.record() as trace:
        ...     for n in range(4):
        ...         kept = pool.allocate(3_000_000 + n)
        >>> advice = allocator.advise(trace)
        >>> advice.lower_bound, advice.plan.peak, advice.plan.offsets
        (6000005, 6000640, (0, 3000320, 0, 3000320))
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
    return Advice(tuple(tried), default, wanted, planned(trace))


def _search(trace: Trace, default: Candidate, hit_rate: float) -> list[Candidate]:
    """Candidates, knob by knob.

    A search for fewer hits may end at more memory than one for more hits, as of one trace in 100:
    so there is one for all hits and one for any.
    """
    replays = {default.rules: default.replay}
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
    """What is to be small; the least important last."""
    replay = candidate.replay
    missing = max(hit_rate - replay.hit_rate, 0)
    return missing, replay.peak_reserved, -replay.hits


def _rules_text(rules: Rules) -> str:
    """What differs from the default rules."""
    changes = []
    for field in fields(Rules):
        value = getattr(rules, field.name)
        if value != field.default:
            text = size_text(value) if isinstance(value, int) else f"{value:g}"
            changes.append(f"{field.name}={text}")
    return ", ".join(changes) or "default rules"
