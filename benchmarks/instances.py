"""Times inference by one instance of a model or by several: ``python -m benchmarks.instances``.

One instance has all cores. Several share them, as threads of one process by CPUPool.submit, or as
processes. Each figure is from a fresh process, and the ways alternate.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics

from benchmarks import _command
from benchmarks._fresh import measured
from benchmarks._harness import powers_up_to
from benchmarks._instances import MODELS, PROCESSES, THREADS
from benchmarks._output import Table

_BATCHES = (1, 8)
_ROUNDS = 3


def table(model: str, batch: int, rounds: int | None) -> Table:
    """Run each number of instances in each way, alternately, ``rounds`` times."""
    cores = len(os.sched_getaffinity(0))
    one = (1, THREADS)
    counts = [count for count in powers_up_to(cores) if count > 1]
    ways = [one, *itertools.product(counts, (THREADS, PROCESSES))]
    found: dict[tuple[int, str], list[float]] = {way: [] for way in ways}
    for _, (count, by) in itertools.product(range(rounds or _ROUNDS), ways):
        given = model, str(batch), str(count), by
        found[count, by].append(measured("instances", *given))
    rows = [
        [
            "one instance" if way == one else f"{way[0]} instances, {way[1]}",
            str(cores // way[0]),
            *(f"{f(rates):.4g}" for f in (max, statistics.median)),
            *(f"{f(rates) / f(found[one]):.2f}" for f in (max, statistics.median)),
        ]
        for way, rates in found.items()
    ]
    header = ["", "cores each", "samples/s, best", "median", "ratio of best", "of medians"]
    return Table(f"{model}, batch {batch}, float32, {rounds or _ROUNDS} processes", header, rows)


if __name__ == "__main__":
    cases = itertools.product(MODELS, _BATCHES)
    workloads = {f"{m} {b}": functools.partial(table, m, b) for m, b in cases}
    _command.run("instances", __doc__, workloads)
