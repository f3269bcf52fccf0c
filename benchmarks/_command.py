"""The command line of a benchmark."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping

from benchmarks import _output
from benchmarks._harness import Report
from benchmarks._output import Table
from fusedoptim.runtime import release_memory

Measure = Callable[[int | None], Report | Table]
"""Takes the number of rounds; None means as many as the workload needs."""


def run(name: str, description: str | None, workloads: Mapping[str, Measure]) -> None:
    """Measure and print the workloads that the command line selects, by default all.

    Args:
        name: name of the benchmark and of its results file.
        description: text for ``--help``.
        workloads: the functions that measure, by name.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_options(parser)
    parser.add_argument(
        "--workload",
        action="append",
        choices=workloads,
        metavar="NAME",  # a benchmark may have hundreds of workloads
        help="only this one, by the name that the output gives it; repeatable",
    )
    args = parser.parse_args()

    _output.print_machine()
    reports = []
    for workload, measure in workloads.items():
        if workload not in (args.workload or workloads):
            continue
        gc.collect()  # the previous workload's optimizers
        release_memory()  # if that workload kept it: those of all would not fit into 24 GiB
        result = measure(args.rounds)
        if isinstance(result, Report):
            _output.print_report(result)
            reports.append(result)
        else:
            _output.print_table(result)
    if args.save:
        _output.save(name, reports)


def positive(text: str) -> int:
    """The number of an option that must be at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every benchmark has."""
    parser.add_argument(
        "--rounds",
        type=positive,
        help="rounds of each workload; the default depends on the workload",
    )
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/")
