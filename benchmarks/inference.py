"""Times whole inferences: ``python -m benchmarks.inference [--peers PYTHON] [--save]``.

Each way to run a model has its own processes, because its threads and memory would change the time
of another; the ways alternate. All have torch's default number of threads. The caches on disk are
empty at first, and each way keeps its own from process to process. ``--save`` replaces the measured
rows in ``results/inference.csv``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import _fresh, _output
from benchmarks._command import positive
from benchmarks._inference import CONFIGURATIONS, DTYPES, EAGER, PEERS, WORKLOADS
from benchmarks._output import RESULTS, Table, format_seconds

FIGURES = RESULTS / "inference.csv"
_FIELDS = (
    *("cpu", "cores", "model", "batch", "dtype", "configuration"),
    *("median_ms", "min_ms", "first_s", "later_s", "peak_mib", "deviation"),
)
_KEY = ("model", "batch", "dtype", "configuration")
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "FUSEDOPTIM_CACHE_DIR")
"""Environment variables with the folders of compiled code."""


class Run(NamedTuple):
    """The measurements of one process: times in seconds, memory in bytes."""

    first: float
    """Time from before the model's conversion or compilation to its first output."""
    seconds: list[float]
    """Times of the later inferences."""
    peak: int
    """Largest resident memory since before the conversion."""
    deviation: float
    """Distance from the plain model's output in float32, relative to the latter's norm."""


class Case(NamedTuple):
    """A model, the size of its batch, and the dtype of its products."""

    model: str
    batch: int
    dtype: str

    def configurations(self, chosen: Sequence[str]) -> list[str]:
        """The chosen configurations that support this dtype and this batch."""
        return [
            name
            for name in chosen
            if self.dtype in CONFIGURATIONS[name].dtypes
            and self.batch >= CONFIGURATIONS[name].least_batch
        ]


Runs = dict[str, list[Run]]
"""The processes of each configuration; none for a configuration that failed."""


def measure(case: Case, configurations: Sequence[str], rounds: int, peers: str) -> Runs:
    """Run the configurations alternately, ``rounds`` times; ``peers`` is the peers' Python."""
    runs: Runs = {name: [] for name in configurations}
    failed: set[str] = set()
    with tempfile.TemporaryDirectory() as caches:
        for _, name in itertools.product(range(rounds), configurations):
            if name in failed:
                continue
            python = peers if name in PEERS else sys.executable
            given = case.model, str(case.batch), case.dtype, name
            folder = Path(caches, str(configurations.index(name)))  # compilers do not accept blanks
            own = {variable: str(folder / variable) for variable in _CACHES}
            try:
                found = _fresh.measured("inference", *given, python=python, variables=own)
            except subprocess.CalledProcessError:
                failed.add(name)  # the process has printed why
                runs[name].clear()
            else:
                runs[name].append(Run(**found))
    return runs


def figures(runs: Sequence[Run]) -> dict[str, Any]:
    """The figures to print and save for the processes of one configuration."""
    seconds = [t for run in runs for t in run.seconds]
    first, *later = (run.first for run in runs)
    return {
        "median_ms": f"{statistics.median(seconds) * 1e3:.4g}",
        "min_ms": f"{min(seconds) * 1e3:.4g}",
        "first_s": f"{first:.3g}",
        "later_s": f"{min(later):.3g}" if later else "",
        "peak_mib": f"{max(run.peak for run in runs) / 2**20:.0f}",
        "deviation": f"{max(run.deviation for run in runs):.1e}",
    }


def table(case: Case, runs: Runs) -> Table:
    """A row for each configuration, with the ratio of eager's median to its own."""
    header = ["", "median", "min", "first s", "later s", "peak MiB", "deviation", "eager over it"]
    found = {name: figures(its) for name, its in runs.items() if its}
    rows = [
        [name, *row.values(), _ratio(found.get(EAGER), row)]
        if (row := found.get(name))
        else [name, "failed", *[""] * (len(header) - 2)]
        for name in runs
    ]
    rounds = max(map(len, runs.values()))
    return Table(
        f"{case.model}, batch {case.batch}, {case.dtype}: ms; {rounds} processes each",
        header,
        rows,
    )


def limit(case: Case, runs: Runs, rounds: int) -> Table:
    """What inferences would take if everything except Linears and convolutions took no time."""
    given = case.model, str(case.batch), case.dtype
    alone = [t for _ in range(rounds) for t in _fresh.measured("inference_products", *given)]
    seconds = {name: [t for run in its for t in run.seconds] for name, its in runs.items() if its}
    rows = []
    for name, times in {"products alone": alone, **seconds}.items():
        medians, minima = ((of(alone), of(times)) for of in (statistics.median, min))
        ratios = (f"{products / whole:.2f}" for products, whole in (medians, minima))
        rows.append([name, f"{medians[1] * 1e3:.4g}", f"{minima[1] * 1e3:.4g}", *ratios])
    return Table(
        f"{case.model}, batch {case.batch}, {case.dtype}: ms; {rounds} processes each",
        ["", "median", "min", "products over it, medians", "minima"],
        rows,
    )


def _ratio(eager: Mapping[str, str] | None, row: Mapping[str, str]) -> str:
    """The median of eager, divided by that of ``row``."""
    return f"{float(eager['median_ms']) / float(row['median_ms']):.2f}" if eager else ""


def save(case: Case, runs: Runs) -> None:
    """Replace the configurations' figures in the file of results."""
    machine = {name: _output.machine()[name] for name in ("cpu", "cores")}
    keys = {name: (case.model, str(case.batch), case.dtype, name) for name in runs}
    rows = (
        machine | dict(zip(_KEY, keys[name])) | figures(its) for name, its in runs.items() if its
    )
    _output.replace_rows(FIGURES, _FIELDS, _KEY, rows)


def optimize(rounds: int) -> Table:
    """Measure time and memory of ``optimize(inplace=True)`` in fresh processes."""
    rows = []
    for purpose, dtype in itertools.product(("inference", "training"), DTYPES):
        runs = [_fresh.measured("optimize_memory", purpose, dtype) for _ in range(rounds)]
        best = min(runs, key=lambda facts: facts["seconds"])
        rows.append(
            [
                f"bert-base, {purpose}, {dtype}",
                format_seconds(best["seconds"]),
                f"{best['peak']:.2f}",
                f"{best['after']:.2f}",
            ]
        )
    header = ["model", "time", "peak memory / model", "memory afterwards / model"]
    return Table("optimize(model, inplace=True)", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--rounds", type=positive, default=3, help="processes of each configuration"
    )
    parser.add_argument("--save", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--model", action="append", choices=WORKLOADS, help="repeatable")
    parser.add_argument("--batch", action="append", type=int, help="those of the model by default")
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--configuration", action="append", choices=CONFIGURATIONS)
    parser.add_argument(
        "--peers",
        metavar="PYTHON",
        help="of an environment with OpenVINO and ONNX Runtime, to measure them too",
    )
    parser.add_argument(
        "--optimize", action="store_true", help="measure time and memory of optimize itself instead"
    )
    parser.add_argument(
        "--products",
        action="store_true",
        help="compare with the time of packed Linears and convolutions alone: the limit",
    )
    args = parser.parse_args()
    if (asked := PEERS.keys() & set(args.configuration or ())) and not args.peers:
        parser.error(f"--configuration '{min(asked)}' needs --peers PYTHON")
    everything = [name for name in CONFIGURATIONS if name not in PEERS or args.peers]
    _output.print_machine()
    if args.optimize:
        _output.print_table(optimize(args.rounds))
        return
    for model, dtype in itertools.product(args.model or WORKLOADS, args.dtype or DTYPES):
        for batch in args.batch or WORKLOADS[model].batches:
            case = Case(model, batch, dtype)
            chosen = case.configurations(args.configuration or everything)
            runs = measure(case, chosen, args.rounds, args.peers)
            if args.products:
                _output.print_table(limit(case, runs, args.rounds))
                continue
            _output.print_table(table(case, runs))
            if args.save:
                save(case, runs)


if __name__ == "__main__":
    main()
