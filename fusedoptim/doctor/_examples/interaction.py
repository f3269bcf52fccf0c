"""Features of samples, laid out as in a DLRM."""

from __future__ import annotations

import numpy as np

from fusedoptim.doctor._examples.example import Example


def features(random: np.random.Generator, step: int, copies: int) -> Example:
    """Runs of samples, whose features lie in any order, with gaps between them."""
    samples, counts, widths = np.array([3, 1, 2]), np.array([9, 1, 4]), np.array([20, 16, 33])
    strides = counts * (widths + 3)
    offsets = [random.permutation(count) * (width + 3) for count, width in zip(counts, widths)]
    padded_counts, padded_widths = -(-counts // 8) * 8, -(-widths // step) * step
    features = strides * (samples + 1)
    columns = widths + counts * (counts - 1) // 2
    sizes = {"features": features, "offsets": counts, "strides": counts}
    sizes |= {f"grad_{name}": size for name, size in sizes.items()}
    signs = random.choice([-1.0, 1.0], (samples + 1).sum())  # by sample, so no product cancels
    values = random.uniform(0.5, 2, features.sum()) * signs.repeat(strides.repeat(samples + 1))
    of_rows = {"offsets": np.concatenate(offsets), "strides": np.repeat(strides, counts)}
    return Example(
        samples,
        {
            **sizes,
            "output": samples * columns,
            "grad": samples * columns,
            "scratch": padded_counts * (copies * padded_widths + padded_counts),
        },
        {
            **of_rows,
            **{f"grad_{name}": values for name, values in of_rows.items()},
            "features": values,
            "first": np.array([1, 0, 1]),
            "samples": samples,
            "count": counts,
            "width": widths,
            "padded_count": padded_counts,
            "padded_width": padded_widths,
        },
    )
