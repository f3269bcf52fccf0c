"""Times merged embedding bags against fbgemm's and IPEX's, each in its own processes.

``python -m benchmarks.embedding_bag_peers [--fbgemm PYTHON] [--ipex PYTHON]``. The processes
alternate. In each, torch's bags are timed interleaved with the contender's. Figures are ratios to
torch in the same process, because IPEX 2.8 needs an older torch. "joined" is fusedoptim with one
tensor of indices for all tables, as fbgemm takes them. fbgemm's Python needs fbgemm-gpu-cpu, IPEX's
needs intel-extension-for-pytorch. malloc keeps freed memory in all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import _fresh, _output
from benchmarks._command import positive
from benchmarks._embedding_bags import WORKLOADS
from benchmarks._output import Table

_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Freed memory is not returned to Linux."""
_ROUNDS = 15
_OF_IPEX = ("sgd", "adagrad")
"""The optimizers that IPEX has."""

Times = dict[str, list[float]]


def measure(workload: str, pythons: Mapping[str, str], processes: int, rounds: int) -> Table:
    """The ratios of each contender to torch in its processes."""
    runs: dict[str, list[Times]] = {name: [] for name in pythons}
    for _ in range(processes):
        for name, python in pythons.items():
            given = workload, name, str(rounds)
            found = _fresh.measured("embedding_bags", *given, python=python, variables=_KEPT)
            runs[name].append(found)
    rows = []
    ours = [_ratio(runs["fusedoptim"], "fusedoptim", f) for f in (min, statistics.median)]
    for name, its in runs.items():
        ratios = [_ratio(its, name, f) for f in (min, statistics.median)]
        times = [
            f"{1e3 * min(_all(its, label)):.3g} ({1e3 * statistics.median(_all(its, label)):.3g})"
            for label in ("torch", name)
        ]
        over = [f"{own / ratio:.2f}" for own, ratio in zip(ours, ratios)]
        rows.append([name, *times, "{:.2f} ({:.2f})".format(*ratios), "{} ({})".format(*over)])
    header = ["", "torch ms", "its ms", "its over torch", "ours over it"]
    return Table(f"{workload}, {processes} processes each, minimum (median)", header, rows)


def _all(runs: Sequence[Times], name: str) -> list[float]:
    return [seconds for run in runs for seconds in run[name]]


def _ratio(runs: Sequence[Times], name: str, figure: Any) -> float:
    return float(figure(_all(runs, name)) / figure(_all(runs, "torch")))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedding_bag_peers", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--fbgemm", metavar="PYTHON", help="of an environment with fbgemm-gpu-cpu")
    parser.add_argument("--ipex", metavar="PYTHON", help="of an environment with IPEX 2.8")
    parser.add_argument("--processes", type=int, default=2, help="of each")
    parser.add_argument("--rounds", type=positive, default=_ROUNDS, help="of each process")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="repeatable")
    args = parser.parse_args()
    _output.print_machine()
    for workload in args.workload or WORKLOADS:
        pythons = {"fusedoptim": sys.executable, "joined": sys.executable}
        if args.fbgemm and not WORKLOADS[workload].split:
            pythons["fbgemm"] = args.fbgemm
        if args.ipex and WORKLOADS[workload].optimizer in _OF_IPEX:
            pythons["IPEX"] = args.ipex
        _output.print_table(measure(workload, pythons, args.processes, args.rounds))


if __name__ == "__main__":
    main()
