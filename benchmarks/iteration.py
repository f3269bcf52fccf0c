"""Times whole training iterations: ``python -m benchmarks.iteration [--save]``.

An iteration is forward, backward and AdamW's step of a real model, in each of the ways to train it.
Each training run has its own process, because its threads and memory would change the time of
another; the ways alternate. ``--save`` replaces the measured rows in ``results/iterations.csv``,
from which the README's picture is drawn.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence

from benchmarks import _fresh, _output
from benchmarks._command import positive
from benchmarks._output import RESULTS, Table
from benchmarks._training import CONFIGURATIONS, IPEX, WORKLOADS, Record

FIGURES = RESULTS / "iterations.csv"
_FIELDS = ("cpu", "cores", "model", "batch", "configuration", "iteration_ms", "step_ms")
OURS, TORCH = "FusedAdamW alone, float32", "torch fused, float32"
"""Configurations that differ only in the optimizer's step."""
LIMITED, BASE = "fusedoptim, bfloat16", "torch fused, bfloat16"
"""The configuration whose products ``--products`` times, and the one that they are compared with.

In float32, products may be oneDNN's, which are not recorded: a dispatch mode gets torch's.
"""

Records = dict[str, list[Record]]
"""The processes of each configuration."""


def measure(model: str, configurations: Sequence[str], rounds: int, ipex: str) -> Records:
    """Train the configurations alternately, ``rounds`` times; ``ipex`` is the Python with IPEX."""
    records: Records = {name: [] for name in configurations}
    for _, name in itertools.product(range(rounds), configurations):
        python = ipex if name == IPEX else sys.executable
        records[name].append(Record(**_fresh.measured("training", model, name, python=python)))
    return records


def table(model: str, records: Records) -> Table:
    """A row for each configuration."""
    parts = ("iteration", "forward", "backward", "step")
    rows = [
        [
            name,
            *(
                f"{_milliseconds(min, runs, part)} ({_milliseconds(statistics.median, runs, part)})"
                for part in parts
            ),
            f"{statistics.median(_all(runs, 'faults')):,.0f}",
            f"{max(run.peak for run in runs) / 2**20:,.0f}",
            f"{min(run.first for run in runs):.2f}",
        ]
        for name, runs in records.items()
    ]
    rounds = len(next(iter(records.values())))
    title = (
        f"{model}: minima (medians) in ms; "
        f"{rounds} processes of {WORKLOADS[model].iterations} iterations"
    )
    return Table(title, ["configuration", *parts, "faults", "peak MiB", "first s"], rows)


def presence(records: Records) -> str:
    """How our step changes the rest of an iteration, compared with torch's step."""
    ratios = [
        statistic(_all(records[OURS], "rest")) / statistic(_all(records[TORCH], "rest"))
        for statistic in (min, statistics.median)
    ]
    return "forward and backward with our step, ratio to with torch's: {:.2f} ({:.2f})".format(
        *ratios
    )


def limit(model: str, rounds: int) -> Table:
    """The time of an iteration if everything except products and convolutions took no time."""
    alone: list[float] = []
    whole: list[Record] = []
    for _ in range(rounds):
        alone += _fresh.measured("products", model, LIMITED)
        whole.append(Record(**_fresh.measured("training", model, BASE)))
    iterations = _all(whole, "iteration")
    rows = []
    for name, statistic in (("minimum", min), ("median", statistics.median)):
        times = statistic(alone), statistic(iterations)
        rows.append([name, *(f"{time * 1e3:.4g}" for time in times), f"{times[0] / times[1]:.2f}"])
    title = (
        f"{model}: matrix products and convolutions of {LIMITED}, alone, "
        f"and iterations of {BASE}, in ms; {rounds} processes each"
    )
    return Table(title, ["", "alone", "iteration", "ratio"], rows)


def _milliseconds(
    statistic: Callable[[Sequence[float]], float], runs: Sequence[Record], part: str
) -> str:
    return f"{statistic(_all(runs, part)) * 1e3:.4g}"


def _all(runs: Sequence[Record], part: str) -> list[float]:
    """One figure of every iteration of every process."""
    return list(itertools.chain.from_iterable(getattr(run, part) for run in runs))


def save(model: str, records: Records) -> None:
    """Replace the configurations' figures in the file that the picture is drawn from."""
    machine = {name: _output.machine()[name] for name in ("cpu", "cores")}
    rows = (
        {
            **machine,
            "model": model,
            "batch": WORKLOADS[model].batch,
            "configuration": name,
            "iteration_ms": _milliseconds(statistics.median, runs, "iteration"),
            "step_ms": _milliseconds(statistics.median, runs, "step"),
        }
        for name, runs in records.items()
    )
    _output.replace_rows(FIGURES, _FIELDS, ("model", "configuration"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.iteration", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--rounds", type=positive, default=3, help="processes of each configuration"
    )
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--model", action="append", choices=WORKLOADS, help="repeatable")
    parser.add_argument("--configuration", action="append", choices=CONFIGURATIONS)
    parser.add_argument(
        "--ipex", metavar="PYTHON", help="of an environment with IPEX 2.8, to measure it too"
    )
    parser.add_argument(
        "--products",
        action="store_true",
        help="time the products and convolutions alone, and torch's whole iterations: the limit",
    )
    args = parser.parse_args()
    if IPEX in (args.configuration or ()) and not args.ipex:
        parser.error(f"--configuration '{IPEX}' needs --ipex PYTHON")
    everything = [name for name in CONFIGURATIONS if name != IPEX or args.ipex]
    configurations = args.configuration or everything
    _output.print_machine()
    for model in args.model or WORKLOADS:
        if args.products:
            _output.print_table(limit(model, args.rounds))
            continue
        records = measure(model, configurations, args.rounds, args.ipex)
        _output.print_table(table(model, records))
        if {OURS, TORCH} <= records.keys():
            print(presence(records))
        if args.save:
            save(model, records)


if __name__ == "__main__":
    main()
