"""Compares the memory that pools reserve with that in use: ``python -m benchmarks.fragmentation``.

Replays allocations of random sizes and of recorded training runs on a simulated upstream; no memory
is touched, and nothing is timed. "ours" is the pool's own code. The others are reimplementations of
published rules: the sizes that they round to, the blocks that they split, and how much they request
from upstream. Each round has another seed, and so another trace. A column "worst" shows the worst
round.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any, NamedTuple

from allocator.pool.blocks import Heap
from benchmarks import _command
from benchmarks._allocation_traces import (
    MIB,
    Trace,
    random_trace,
    transformer_trace,
    two_models_trace,
)
from benchmarks._output import Table

_SEEDS = 3
TRACES: dict[str, Callable[[int], Trace]] = {
    "random": random_trace,
    "transformer": transformer_trace,
    "two models": two_models_trace,
}
"""The function that makes the trace of each workload from a seed."""


class Upstream:
    """A source of addresses without memory."""

    def __init__(self) -> None:
        self._next = MIB
        self.reserved = 0
        self.peak = 0
        self.allocations = 0
        self.releases = 0

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Return an address, and the size as its handle."""
        address = self._next
        self._next += nbytes + MIB  # a gap, so that no two segments are adjacent
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        self.allocations += 1
        return address, nbytes

    def release(self, handle: int) -> None:
        """Take back ``handle`` bytes."""
        self.reserved -= handle
        self.releases += 1


class Policy(NamedTuple):
    """The policy of an allocator; sizes are in bytes."""

    name: str
    rounded: Callable[[int], int]
    """Returns the rounded size of a request."""
    pool: Callable[[int], int]
    """Returns the number of the pool that serves a size."""
    segment: Callable[[int, int], int]
    """Returns how much to request from upstream for a size, given what is reserved."""
    splits: Callable[[int, int], bool]
    """Returns whether a block is split for a size with that remainder."""
    over_reserve: float | None = None
    """Share of the peak above which free segments are released; None if they never are."""


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _torch_segment(size: int, reserved: int) -> int:
    if size <= MIB:
        return 2 * MIB
    return 20 * MIB if size < 10 * MIB else _round_up(size, 2 * MIB)


TORCH = Policy(
    "torch's rules",
    rounded=lambda nbytes: _round_up(nbytes, 512),
    pool=lambda size: size > MIB,
    segment=_torch_segment,
    splits=lambda size, rest: rest >= 512 if size <= MIB else rest > MIB,
)
OTHERS = (
    TORCH,
    TORCH._replace(name="torch's, bounded to 5%", over_reserve=0.05),
    Policy(
        "CuPy's rules",
        rounded=lambda nbytes: _round_up(nbytes, 512),
        pool=lambda size: 0,
        segment=lambda size, reserved: size,
        splits=lambda size, rest: rest > 0,
    ),
    Policy(
        "RMM's pool's rules",
        rounded=lambda nbytes: _round_up(nbytes, 256),
        pool=lambda size: 0,
        segment=max,
        splits=lambda size, rest: rest > 0,
    ),
)


class _Piece:
    """A piece of a segment, linked to the pieces before and after it."""

    def __init__(self, pool: int, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.is_free = False
        self.before: _Piece | None = None
        self.after: _Piece | None = None


class _PolicyHeap:
    """Best fit with splitting and merging under another allocator's rules."""

    def __init__(self, upstream: Upstream, policy: Policy) -> None:
        self._upstream = upstream
        self._policy = policy
        self._free: dict[int, list[tuple[int, int, _Piece]]] = {}
        self._live = self._peak_live = 0

    def allocate(self, nbytes: int) -> _Piece:
        policy = self._policy
        size = policy.rounded(nbytes)
        free = self._free.setdefault(policy.pool(size), [])
        index = bisect_left(free, (size,))
        self._peak_live = max(self._peak_live, self._live + size)
        piece = free.pop(index)[2] if index < len(free) else self._grow(size)
        rest = piece.size - size
        if rest and policy.splits(size, rest):
            self._split(piece, size)
        piece.is_free = False
        self._live += piece.size
        return piece

    def free(self, piece: _Piece) -> None:
        self._live -= piece.size
        if piece.after is not None and piece.after.is_free:
            self._take(piece.after)
            self._merge(piece)
        if piece.before is not None and piece.before.is_free:
            piece = piece.before
            self._take(piece)
            self._merge(piece)
        self._put(piece)

    def _grow(self, size: int) -> _Piece:
        nbytes = self._policy.segment(size, self._upstream.reserved)
        if self._policy.over_reserve is not None:
            self._release_free((1 + self._policy.over_reserve) * self._peak_live - nbytes)
        address, _ = self._upstream.allocate(nbytes)
        return _Piece(self._policy.pool(size), address, nbytes)

    def _release_free(self, target: float) -> None:
        for _, _, piece in sorted(itertools.chain(*self._free.values()), reverse=True):
            if self._upstream.reserved <= target:
                break
            if piece.before is piece.after is None:
                self._take(piece)
                self._upstream.release(piece.size)

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.pool, piece.address + size, piece.size - size)
        rest.before, rest.after = piece, piece.after
        if piece.after is not None:
            piece.after.before = rest
        piece.after = rest
        piece.size = size
        self._put(rest)

    def _merge(self, piece: _Piece) -> None:
        """Merge the next piece into ``piece``."""
        absorbed = piece.after
        assert absorbed is not None
        piece.size += absorbed.size
        piece.after = absorbed.after
        if piece.after is not None:
            piece.after.before = piece

    def _put(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._free[piece.pool], (piece.size, piece.address, piece))

    def _take(self, piece: _Piece) -> None:
        free = self._free[piece.pool]
        del free[bisect_left(free, (piece.size, piece.address))]


POLICIES: dict[str, Callable[[Upstream], Any]] = {"ours": Heap} | {
    policy.name: functools.partial(_PolicyHeap, policy=policy) for policy in OTHERS
}


class Outcome(NamedTuple):
    """Result of replaying a trace on a pool."""

    ratio: float
    """Peak of reserved bytes, divided by the peak of live bytes."""
    hits: float
    """Share of the allocations that made no upstream call."""
    upstream_calls: int


def replay(trace: Trace, pool: Any, upstream: Upstream) -> Outcome:
    blocks: dict[int, Any] = {}
    live = peak = allocations = misses = 0
    for name, nbytes in trace:
        if nbytes > 0:
            before = upstream.allocations
            blocks[name] = pool.allocate(nbytes)
            misses += upstream.allocations > before
            allocations += 1
            live += _round_up(nbytes, 512)
            peak = max(peak, live)
        else:
            pool.free(blocks.pop(name))
            live -= _round_up(-nbytes, 512)
    calls = upstream.allocations + upstream.releases
    return Outcome(upstream.peak / peak, 1 - misses / allocations, calls)


def compare(workload: str, rounds: int | None) -> Table:
    traces = [TRACES[workload](seed) for seed in range(rounds or _SEEDS)]
    rows = []
    for name, pool in POLICIES.items():
        upstreams = [Upstream() for _ in traces]
        outcomes = [
            replay(trace, pool(upstream), upstream) for trace, upstream in zip(traces, upstreams)
        ]
        ratios, hits, calls = zip(*outcomes)
        figures = [f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}"]
        figures += [f"{statistics.median(hits):.2%}", f"{min(hits):.2%}"]
        figures += [f"{statistics.median(calls):.0f}", f"{max(calls)}"]
        rows.append([name, *figures])
    header = ["policy", "reserved/live", "worst", "hits", "worst", "upstream calls", "worst"]
    events = statistics.median(map(len, traces))
    return Table(f"{workload} ({len(traces)} seeds, {events:,.0f} events each)", header, rows)


if __name__ == "__main__":
    _command.run(
        "fragmentation",
        __doc__,
        {workload: functools.partial(compare, workload) for workload in TRACES},
    )
