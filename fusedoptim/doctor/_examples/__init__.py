"""Valid arguments, for the self-test, of kernels whose accesses depend on the values they read.

Each file has the name of the file with the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from fusedoptim.doctor._examples import embedding_bag, interaction, nms, roi_align, sort_indices
from fusedoptim.doctor._examples.example import Example

_ROWS = ("sum_rows", "sgd_rows", "adagrad_rows", "rowwise_adagrad_rows")

EXAMPLES: dict[str, Callable[[np.random.Generator], Example]] = {
    "embedding_bag": embedding_bag.bags,
    "count_keys": sort_indices.part_of_keys,
    "move_keys": sort_indices.counted,
    "sort_indices": sort_indices.unsorted,
    "write_keys": sort_indices.part_of_bags,
    **dict.fromkeys(_ROWS, embedding_bag.sorted_keys),
    "interaction": functools.partial(interaction.features, step=16, copies=1),
    "interaction_backward": functools.partial(interaction.features, step=32, copies=2),
    "nms": nms.boxes,
    "channels_first": roi_align.channels_first,
    "roi_align": roi_align.average(1),
    "roi_align_backward": roi_align.spread(1),
    "roi_align_backward_strided": roi_align.spread(roi_align.APART),
    "roi_align_strided": roi_align.average(roi_align.APART),
    "roi_align_taps": roi_align.taps,
}
"""The function that makes the arguments of each kernel, by the kernel's name."""
