"""Embedding bags while torch.jit.trace records, which has no lists of bools as arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


def traced_bags(
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
    sparse: bool,
) -> list[Tensor]:
    """What ``bags_of_tables`` returns, by torch's function for each table.

    Sizes are recorded as those of tensors, so the trace also computes batches of other sizes.
    """
    is_joined = len(indices) < len(weights)
    if is_joined:
        indices, offsets, samples = _of_tables(len(weights), indices, offsets, samples, last)
        last = True
    bags = [
        torch.nn.functional.embedding_bag(
            own,
            weight,
            starts,
            mode="mean" if is_mean else "sum",
            sparse=sparse,
            per_sample_weights=samples[t] if samples else None,
            include_last_offset=last,
            padding_idx=None if padding < 0 else padding,
        )
        for t, (weight, own, starts, is_mean, padding) in enumerate(
            zip(weights, indices, offsets, means, paddings)
        )
    ]
    return [torch.cat(bags, 1)] if is_joined else bags


def _of_tables(
    tables: int, indices: Tensors, offsets: Tensors, samples: Tensors, last: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The bags of each table, with offsets that include where the last bag ends."""
    (values,), (starts,) = indices, offsets
    if not last:
        end = torch.zeros_like(starts[:1]) + values.shape[0]  # a tensor in a trace
        starts = torch.cat([starts, end])
    bags = (starts.shape[0] - 1) // tables
    parts = [starts[t * bags : (t + 1) * bags + 1] for t in range(tables)]
    own, factors = (
        [joined[part[0] : part[-1]] for joined in tensors for part in parts]
        for tensors in (indices, samples)
    )
    return own, [part - part[0] for part in parts], factors
