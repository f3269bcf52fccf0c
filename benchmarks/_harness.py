"""What every benchmark shares: interleaved timing, the machine's description, tables and CSV."""

from __future__ import annotations

import csv
import datetime
import functools
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from fusedoptim.allocator import queue

RESULTS = Path(__file__).with_name("results")
_WARM_UP_ROUNDS = 3  # the first step makes state, the second is the first of the steady kind
_FIELDS = (
    "date",
    "cpu",
    "cores",
    "torch",
    "dpctl",
    "driver",
    "workload",
    "contender",
    "rounds",
    "min_us",
    "median_us",
    "ratio_min",
    "ratio_median",
    "gb_per_s",
)


class Contender(NamedTuple):
    """One way to take the step that is timed."""

    name: str
    step: Callable[[], object]


class Absent(NamedTuple):
    """A contender that cannot run here, and why."""

    name: str
    reason: str


class Timing(NamedTuple):
    """How long one contender took, round by round."""

    name: str
    seconds: Sequence[float]

    @property
    def minimum(self) -> float:
        """Seconds of the fastest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


class Report(NamedTuple):
    """The timings of one workload, its base first."""

    workload: str
    bytes_moved: int | None
    """by one step, or None where that says nothing."""
    timings: Sequence[Timing]
    absent: Sequence[Absent] = ()

    def gigabytes_per_second(self, timing: Timing) -> float | None:
        """The traffic of the fastest round."""
        return None if self.bytes_moved is None else self.bytes_moved / timing.minimum / 1e9

    def ratios(self, timing: Timing) -> tuple[float, float]:
        """Minimum and median, each over the base's."""
        base = self.timings[0]
        return timing.minimum / base.minimum, timing.median / base.median


def time_interleaved(
    contenders: Sequence[Contender],
    rounds: int,
    before_step: Callable[[], None],
    *,
    lead: int = 0,
    limit: float = math.inf,
) -> list[Timing]:
    """Time the contenders in turn, round after round.

    What slows the machine for a while, such as another job, then slows all of them, and each
    finds the caches and torch's threads as the one before left them.

    Args:
        contenders: in the order in which they run.
        rounds: that are timed, after a few that are not.
        before_step: called before each step, untimed.
        lead: steps that a contender takes untimed in each of its turns, before the timed one.
        limit: seconds after which no further round starts.
    """
    seconds: list[list[float]] = [[] for _ in contenders]
    end = time.perf_counter() + limit
    gc.collect()
    gc.disable()
    try:
        for timed in [False] * _WARM_UP_ROUNDS + [True] * rounds:
            if seconds[0] and time.perf_counter() > end:
                break
            for contender, times in zip(contenders, seconds):
                for _ in range(lead):
                    before_step()
                    contender.step()
                before_step()
                start = time.perf_counter()
                contender.step()
                elapsed = time.perf_counter() - start
                if timed:
                    times.append(elapsed)
    finally:
        gc.enable()
    return [Timing(contender.name, times) for contender, times in zip(contenders, seconds)]


@functools.cache
def machine() -> dict[str, str]:
    """What the numbers depend on besides the code."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "torch": metadata.version("torch"),
        "dpctl": metadata.version("dpctl"),
        "numpy": metadata.version("numpy"),
        "driver": queue("cpu").sycl_device.driver_version,
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


def print_machine() -> None:
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)


def print_report(report: Report, reference: str | None = None) -> None:
    """Print one workload as a table.

    Args:
        report: to print.
        reference: the contender whose minimum is 100% of a last column.
    """
    header = ["contender", "min", "median", "ratio min", "ratio median"]
    if report.bytes_moved is not None:
        header.append("GB/s")
    if reference is not None:
        header.append(f"of {reference}")
    rows = [_cells(report, timing, reference) for timing in report.timings]
    print(f"\n{report.workload} ({len(report.timings[0].seconds)} rounds)")
    print_table(header, rows)
    for absent in report.absent:
        print(f"{absent.name}: not available: {absent.reason}")


def _cells(report: Report, timing: Timing, reference: str | None) -> list[str]:
    ratio_min, ratio_median = report.ratios(timing)
    speed = report.gigabytes_per_second(timing)
    cells = [
        timing.name,
        format_seconds(timing.minimum),
        format_seconds(timing.median),
        f"{ratio_min:.2f}",
        f"{ratio_median:.2f}",
    ]
    if speed is not None:
        cells.append(f"{speed:.1f}")
    if reference is not None:
        best = next(t.minimum for t in report.timings if t.name == reference)
        cells.append(f"{best / timing.minimum:.0%}")
    return cells


def format_seconds(seconds: float) -> str:
    """Three digits or so, in the unit that suits."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in (header, *rows):
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths))
        print("  ".join([first, *(cell.strip().rjust(w) for cell, w in zip(others, widths[1:]))]))


def save(name: str, reports: Sequence[Report]) -> None:
    """Append the reports to ``results/<name>.csv``."""
    path = RESULTS / f"{name}.csv"
    path.parent.mkdir(exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, extrasaction="ignore", lineterminator="\n")
        if is_new:
            writer.writeheader()
        for report in reports:
            writer.writerows(_record(report, timing) for timing in report.timings)
    print(f"\nsaved to {path}")


def _record(report: Report, timing: Timing) -> Mapping[str, str]:
    ratio_min, ratio_median = report.ratios(timing)
    speed = report.gigabytes_per_second(timing)
    return machine() | {
        "workload": report.workload,
        "contender": timing.name,
        "rounds": str(len(timing.seconds)),
        "min_us": f"{timing.minimum * 1e6:.2f}",
        "median_us": f"{timing.median * 1e6:.2f}",
        "ratio_min": f"{ratio_min:.4f}",
        "ratio_median": f"{ratio_median:.4f}",
        "gb_per_s": "" if speed is None else f"{speed:.2f}",
    }
