"""Times steps on 1, 2, 4 ... cores against pure traffic: ``python -m benchmarks.cores``.

A step cannot gain more from cores than a kernel that moves the same bytes. Each number of threads,
up to the number of cores, has its own process, and the processes alternate. Within a process, the
step alternates with kernels that only move the bytes of SGD and of Adam, and with two torch
operations that move SGD's.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Sequence

from benchmarks import _command, _fresh
from benchmarks._cores import ADAM_TRAFFIC, OPERATIONS, TRAFFIC
from benchmarks._harness import powers_up_to
from benchmarks._output import Table, format_seconds

_PURE = (TRAFFIC, ADAM_TRAFFIC, OPERATIONS)
_LISTS = ("16.8M", "bert-base")
_SUMMARIES: Sequence[Callable[[Sequence[float]], float]] = (min, statistics.median)


def table(workload: str, rounds: int | None) -> Table:
    """Measure in 2 processes for each number of threads, or as many as ``rounds`` says."""
    counts = powers_up_to(len(os.sched_getaffinity(0)))
    found: dict[int, dict[str, list[float]]] = {count: {} for count in counts}
    for _, count in itertools.product(range(rounds or 2), counts):
        for name, seconds in _fresh.measured(
            "cores", workload, variables={"OMP_NUM_THREADS": str(count)}
        ).items():
            found[count].setdefault(name, []).extend(seconds)
    rows = []
    for count, name in itertools.product(counts, found[1]):
        gains = [_gain(found, count, name, summary) for summary in _SUMMARIES]
        over = [
            _ratios(gains, [_gain(found, count, pure, summary) for summary in _SUMMARIES])
            for pure in _PURE
        ]
        times = [format_seconds(summary(found[count][name])) for summary in _SUMMARIES]
        rows.append([name, str(count), *times, *(f"{gain:.2f}" for gain in gains), *over])
    header = ["step", "threads", "min", "median", "gain min", "gain median"]
    header += [f"of {pure}" for pure in _PURE]
    return Table(f"{workload}: what threads gain, and how much of what pure traffic", header, rows)


def _gain(
    found: dict[int, dict[str, list[float]]],
    count: int,
    name: str,
    summary: Callable[[Sequence[float]], float],
) -> float:
    return summary(found[1][name]) / summary(found[count][name])


def _ratios(gains: Sequence[float], others: Sequence[float]) -> str:
    minimum, median = (gain / other for gain, other in zip(gains, others))
    return f"{minimum:.0%} ({median:.0%})"


if __name__ == "__main__":
    _command.run("cores", __doc__, {name: functools.partial(table, name) for name in _LISTS})
