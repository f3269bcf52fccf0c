"""The indices of bags of three tables, to be sorted."""

from __future__ import annotations

import numpy as np

from fusedoptim.doctor._examples.embedding_bag import BAGS, ONE, PADDING, indices_and_offsets
from fusedoptim.doctor._examples.example import Example


def unsorted(random: np.random.Generator) -> Example:
    """Those of three tables, by one, two and three digits."""
    indices, offsets = indices_and_offsets(random)
    counts = np.array([len(part) for part in indices])
    passes, digit_bits = np.array([1, 3, 2]), np.array([6, 1, 2])
    counters = passes << digit_bits
    rows = {"keys": counts, "spare": counts, "counters": counters, "bags_of": counts}
    zeros = {name: np.zeros(sizes.sum(), np.int64) for name, sizes in rows.items()}
    return Example(
        BAGS,
        {
            "indices": counts,
            "offsets": BAGS + 1,
            "factors": BAGS,
            "sorted_count": ONE,
            **rows,
        },
        {
            **zeros,
            "indices": np.concatenate(indices),
            "offsets": np.concatenate(offsets),
            "sorted_count": 0 * ONE,
            "bags": BAGS,
            "bags_left": BAGS + 1,
            "count": counts,
            "padding": PADDING,
            "passes": passes,
            "digit_bits": digit_bits,
            "is_weighted": np.array([0, 1, 0]),
            "is_mean": np.array([0, 0, 1]),
        },
    )
