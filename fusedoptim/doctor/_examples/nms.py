"""Lists of boxes."""

from __future__ import annotations

import numpy as np

from fusedoptim.doctor._examples.example import Example


def boxes(random: np.random.Generator) -> Example:
    """Three lists of boxes whose corners are integers, so that no overlap is near the threshold."""
    sizes = np.array([50, 1, 20])
    corners = random.integers(1, 12, (sizes.sum(), 2))
    sides = random.integers(1, 7, corners.shape)
    boxes = np.concatenate([corners, corners + sides, sides.prod(1, keepdims=True)], 1)
    return Example(
        sizes,
        {
            "boxes": 5 * sizes,
            "best": 5 * sizes,
            "rivals": np.full(len(sizes), 32),
            "kept": sizes,
            "count": np.ones_like(sizes),
        },
        {
            "size": sizes,
            "boxes": boxes.ravel().astype(np.float64),
            "rivals": np.zeros(32 * len(sizes)),
            "kept": np.zeros(sizes.sum()),
            "count": np.zeros(len(sizes)),
            "threshold": 0.5035,
        },
        scratch=("rivals",),
    )
