"""Embedding bags of three tables."""

from __future__ import annotations

import numpy as np

from fusedoptim.doctor._examples.example import Example, Integers

BAGS, _TABLE_ROWS, _WIDTHS = np.array([5, 1, 3]), np.array([40, 7, 12]), np.array([20, 80, 33])
"""The numbers of bags, rows and columns of three tables."""
PADDING = np.array([-1, 3, 5])
ONE = np.ones(3, np.int64)


def indices_and_offsets(random: np.random.Generator) -> tuple[list[Integers], list[Integers]]:
    """Random indices and offsets of each table; some bags are empty."""
    indices: list[Integers] = []
    offsets: list[Integers] = []
    for bags, of_table in zip(BAGS, _TABLE_ROWS):
        sizes = random.integers(0, 9, bags)
        offsets.append(np.concatenate([[0], np.cumsum(sizes)]))
        indices.append(random.integers(0, of_table, sizes.sum()))
    return indices, offsets


def bags(random: np.random.Generator) -> Example:
    """Bags of three tables: sums, weighted sums without padding, and means."""
    indices, offsets = indices_and_offsets(random)
    counts = np.array([len(part) for part in indices])
    return Example(
        BAGS,
        {
            "table": _TABLE_ROWS * _WIDTHS,
            "indices": counts,
            "offsets": BAGS + 1,
            "weights": counts,
            "output": BAGS * (_WIDTHS + 3),
            "faults": ONE,
        },
        {
            "indices": np.concatenate(indices),
            "offsets": np.concatenate(offsets),
            "faults": 0 * ONE,
            "bags": BAGS,
            "bags_left": BAGS + 1,
            "count": counts,
            "table_rows": _TABLE_ROWS,
            "width": _WIDTHS,
            "stride": _WIDTHS + 3,
            "padding": PADDING,
            "is_first": ONE,
            "is_weighted": np.array([0, 1, 0]),
            "is_mean": np.array([0, 0, 1]),
        },
    )


def sorted_keys(random: np.random.Generator) -> Example:
    """Sorted keys of three tables, and gradients of bags; the last table omits its first key."""
    keys: list[Integers] = []
    bags_of: list[Integers] = []
    for bags, of_table in zip(BAGS, _TABLE_ROWS):
        size = int(random.integers(3, 20))
        payload = random.permutation(np.arange(20))[:size]
        bags_of.append(random.integers(0, bags, 20))
        rows = np.sort(random.integers(0, of_table, size))
        weighted = len(keys) == 1
        keys.append(rows << 32 | (payload if weighted else bags_of[-1][payload]))
    counts = np.array([len(part) for part in keys])
    elements = _TABLE_ROWS * _WIDTHS
    return Example(
        counts,
        {
            "param": elements,
            "sum": elements,
            "result": elements,
            "grad": BAGS * (_WIDTHS + 3),
            "row_grad": _WIDTHS,
            "keys": counts,
            "factors": 20 * ONE,
            "bags_of": 20 * ONE,
            "sorted_count": ONE,
        },
        {
            "keys": np.concatenate(keys),
            "bags_of": np.concatenate(bags_of),
            "sorted_count": counts,
            "first": np.array([0, 0, 1]),
            "last": counts,
            "width": _WIDTHS,
            "stride": _WIDTHS + 3,
            "is_weighted": np.array([0, 1, 0]),
            "is_mean": np.array([0, 0, 1]),
        },
    )
