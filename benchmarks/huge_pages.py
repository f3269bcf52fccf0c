"""Times embedding tables in huge pages: ``python -m benchmarks.huge_pages``.

Trains 26 ``torch.nn.EmbeddingBag(sparse=True)`` of 200,000 rows of 64, batch 2048, with torch's
SGD: with and without torch's ``THP_MEM_ALLOC_ENABLE=1``, or with ``use_huge_pages`` for the tables,
and with freed memory kept or not. Each run is its own process, and the ways alternate. Where Linux
gives huge pages always or never, the variable changes nothing; the last column shows how much
memory lies in them.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import _command
from benchmarks._fresh import measured
from benchmarks._output import Table, format_seconds

VARIABLE = "THP_MEM_ALLOC_ENABLE"
PARTS = ("forward and backward", "update")
_WAYS = {
    "unchanged": ("0", False, False),
    "variable": ("1", False, False),
    "use_huge_pages": ("0", False, True),
    "memory kept": ("0", True, False),
    "variable, memory kept": ("1", True, False),
    "use_huge_pages, memory kept": ("0", True, True),
}


def table(rows_a_bag: int, rounds: int | None) -> Table:
    """Step in each way, in 3 processes or as many as ``rounds`` says."""
    count = rounds or 3
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in _WAYS}
    for _, (way, (value, kept, moved)) in itertools.product(range(count), _WAYS.items()):
        given = str(rows_a_bag), str(kept), str(moved)
        runs[way].append(measured("embeddings", *given, variables={VARIABLE: value}))
    base, *_ = _WAYS
    rows = [
        [
            f"{part}, {way}",
            *(format_seconds(f(_all(runs[way], part))) for f in (min, statistics.median)),
            *(
                f"{f(_all(runs[base], part)) / f(_all(runs[way], part)):.2f}"
                for f in (min, statistics.median)
            ),
            f"{statistics.median(run['huge'] for run in runs[way]):,.0f}",
        ]
        for part, way in itertools.product(PARTS, _WAYS)
    ]
    header = ["", "min", "median", "gain of min", "of median", "MiB in huge pages"]
    return Table(f"{rows_a_bag} rows a bag, {count} processes each", header, rows)


def _all(runs: Sequence[dict[str, Any]], part: str) -> list[float]:
    return [seconds for run in runs for seconds in run[part]]


if __name__ == "__main__":
    _command.run("huge_pages", __doc__, {f"{n} rows": functools.partial(table, n) for n in (1, 20)})
