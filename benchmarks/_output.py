"""The machine's description, tables and CSV."""

from __future__ import annotations

import csv
import datetime
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from benchmarks._harness import Report, Timing
from fusedoptim.allocator import queue

RESULTS = Path(__file__).with_name("results")
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


def replace_rows(
    path: Path, fields: Sequence[str], key: Sequence[str], rows: Iterable[Mapping[str, str]]
) -> None:
    """Write rows to a CSV file: each replaces the row with an equal key, or is appended."""
    kept: dict[tuple[str, ...], Mapping[str, str]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            kept = {tuple(row[name] for name in key): row for row in csv.DictReader(file)}
    kept |= {tuple(row[name] for name in key): row for row in rows}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())


class Table(NamedTuple):
    """Results that are printed and not saved."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@functools.cache
def machine() -> dict[str, str]:
    """Return the facts that results depend on besides the code."""
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


def print_report(report: Report) -> None:
    header = ["contender", "min", "median", "ratio min", "ratio median"]
    columns = [
        [timing.name for timing in report.timings],
        [format_seconds(timing.minimum) for timing in report.timings],
        [format_seconds(timing.median) for timing in report.timings],
        *([f"{t.over(report.base)[i]:.2f}" for t in report.timings] for i in (0, 1)),
    ]
    optional = {
        "GB/s": [_speed(timing, ".1f") for timing in report.timings],
        f"of {report.reference}": [_percent(report, timing) for timing in report.timings],
        "to its peer": [_to_peer(report, timing) for timing in report.timings],
    }
    for name, column in optional.items():
        if any(column):
            header.append(name)
            columns.append(column)
    title = f"{report.workload} ({len(report.base.seconds)} rounds)"
    print_table(Table(title, header, list(zip(*columns))))
    for note in report.notes:
        print(note)


def _speed(timing: Timing, digits: str) -> str:
    speed = timing.gigabytes_per_second
    return "" if speed is None else format(speed, digits)


def _percent(report: Report, timing: Timing) -> str:
    """Return the traffic relative to the reference's."""
    if report.reference is None:
        return ""
    best = report.timing(report.reference).gigabytes_per_second
    speed = timing.gigabytes_per_second
    return "" if best is None or speed is None else f"{speed / best:.0%}"


def _to_peer(report: Report, timing: Timing) -> str:
    peer = timing.peer
    if peer is None:
        return ""
    minimum, median = timing.over(report.timing(peer))
    return f"{minimum:.2f} ({median:.2f})"


def format_seconds(seconds: float) -> str:
    """Format with about three digits in a suitable unit."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def print_table(table: Table) -> None:
    """Print columns, the first aligned left and the others right."""
    print(f"\n{table.title}")
    widths = [max(map(len, column)) for column in zip(table.header, *table.rows)]
    for row in (table.header, *table.rows):
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
    ratio_min, ratio_median = timing.over(report.base)
    return machine() | {
        "workload": report.workload,
        "contender": timing.name,
        "rounds": str(len(timing.seconds)),
        "min_us": f"{timing.minimum * 1e6:.2f}",
        "median_us": f"{timing.median * 1e6:.2f}",
        "ratio_min": f"{ratio_min:.4f}",
        "ratio_median": f"{ratio_median:.4f}",
        "gb_per_s": _speed(timing, ".2f"),
    }
