"""Valid arguments, for the self-test, of kernels whose accesses depend on the values they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]


class Example(NamedTuple):
    """One launch; what it does not give is random."""

    lengths: Integers
    """Of the rows: what a kernel's Length is."""
    sizes: Mapping[str, Integers]
    """Elements of each array that belong to each row."""
    given: Mapping[str, Any]
    """Indices of all rows together; integers of each row, and of the launch."""


def _bags(random: np.random.Generator) -> Example:
    """Three groups of bags, each of a table of its own; some bags are empty."""
    lengths, rows, widths = np.array([5, 1, 3]), np.array([40, 7, 12]), np.array([20, 16, 33])
    indices, offsets = [], []
    for bags, of_table in zip(lengths, rows):
        sizes = random.integers(0, 9, bags)
        offsets.append(np.concatenate([[0], np.cumsum(sizes)]))
        indices.append(random.integers(0, of_table, sizes.sum()))
    return Example(
        lengths,
        {
            "table": rows * widths,
            "indices": np.array([len(part) for part in indices]),
            "offsets": lengths + 1,
            "output": lengths * (widths + 3),
        },
        {
            "indices": np.concatenate(indices),
            "offsets": np.concatenate(offsets),
            "width": widths,
            "stride": widths + 3,
        },
    )


EXAMPLES: dict[str, Callable[[np.random.Generator], Example]] = {"embedding_bag": _bags}
"""By the kernel's name."""
