"""Times the steps of optimizers, each in its own processes; the processes alternate."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks import _fresh
from benchmarks._command import positive
from benchmarks._output import Table, format_seconds


class Contender(NamedTuple):
    """An optimizer."""

    path: str
    """The path of its class, such as "torch.optim:AdamW"."""
    arguments: dict[str, Any]
    package: str | None = None
    """The peer's package, which another Python has; None for this Python."""


def parser(module: str, description: str | None, packages: Mapping[str, str], rounds: int) -> Any:
    """A parser with ``--rounds`` and with an option for each package."""
    result = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    result.formatter_class = argparse.RawDescriptionHelpFormatter
    result.add_argument(
        "--rounds", type=positive, default=rounds, help="processes of each optimizer"
    )
    for option, package in packages.items():
        help_text = f"of an environment with {package}, to measure it too"
        result.add_argument(f"--{option}", metavar="PYTHON", help=help_text)
    return result


def table(
    contenders: Mapping[str, Contender], args: argparse.Namespace, model: str, dtype: str
) -> Table:
    """Step each contender in ``args.rounds`` processes; the first one is the base."""
    chosen = {
        name: (contender, python)
        for name, contender in contenders.items()
        if (python := getattr(args, contender.package) if contender.package else sys.executable)
    }
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for _, (name, (contender, python)) in itertools.product(range(args.rounds), chosen.items()):
        given = contender.path, json.dumps(contender.arguments), model, dtype
        runs[name].append(_fresh.measured("timed_step", *given, python=python))
    base, *_ = runs
    times = {name: [t for run in found for t in run["seconds"]] for name, found in runs.items()}
    rows = [
        [
            name,
            *(format_seconds(f(seconds)) for f in (min, statistics.median)),
            *(f"{f(seconds) / f(times[base]):.2f}" for f in (min, statistics.median)),
            f"{runs[name][0]['bytes']:.2f}",
            format_seconds(min(run["first"] for run in runs[name])),
        ]
        for name, seconds in times.items()
    ]
    header = ["", "min", "median", "ratio", "of medians", "state bytes a weight", "first step"]
    title = f"{model} {dtype}, {args.rounds} processes each; the base is {base}"
    return Table(title, header, rows)
