"""Measures page faults and memory with and without keep_memory: ``python -m benchmarks.memory``.

Each run is its own process, and each round has other shapes; the last column has the ratio of the
peaks in each round. The peak is the largest resident memory, including that of a DataLoader's
workers.
"""

from __future__ import annotations

import functools
import statistics

from benchmarks import _command
from benchmarks._fresh import measured
from benchmarks._output import Table
from benchmarks._varied import WORKLOADS

FREED = "unchanged"
WAYS = (FREED, "kept")


def table(workload: str, rounds: int | None) -> Table:
    """Run a workload in both ways alternately: 3 processes of each, or as many as ``rounds`` says.

    The shapes of a round are the same for each way, and differ from the round before.
    """
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for seed in range(rounds or 3):
        for way in WAYS:
            runs[way].append(measured("varied", workload, str(way != FREED), str(seed)))
    medians = {
        way: {name: statistics.median(run[name] for run in found) for name in found[0]}
        for way, found in runs.items()
    }
    rows = [
        [
            way,
            f"{figures['seconds'] * 1e3:.1f}",
            f"{figures['system'] * 1e3:.1f}",
            f"{figures['faults']:,.0f}",
            f"{figures['peak'] / 2**20:,.0f}",
            " ".join(
                f"{run['peak'] / freed['peak']:.2f}" for run, freed in zip(runs[way], runs[FREED])
            ),
        ]
        for way, figures in medians.items()
    ]
    header = ["freed memory", "ms", "system ms", "faults", "peak MiB", "ratios"]
    iterations = WORKLOADS[workload].iterations
    return Table(f"{workload}: medians of an iteration, after {iterations // 2}", header, rows)


if __name__ == "__main__":
    _command.run("memory", __doc__, {name: functools.partial(table, name) for name in WORKLOADS})
