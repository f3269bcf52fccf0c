"""Random bags of several tables, in both forms, and torch's results for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WIDTHS = (8, 16, 20, 64, 100, 128, 256, 1, 65)
ROWS = (50, 1, 7, 300)


class Bags(NamedTuple):
    """The indices of each table, and the offsets where each bag begins and the last one ends."""

    indices: list[Tensor]
    offsets: list[Tensor]

    @property
    def joined(self) -> tuple[Tensor, Tensor]:
        """One tensor of all indices, and one of all offsets with the end of the last bag."""
        starts = [torch.zeros(1, dtype=self.offsets[0].dtype)]
        before = 0
        for own, offsets in zip(self.indices, self.offsets):
            starts.append(before + offsets[1:])
            before += len(own)
        return torch.cat(self.indices), torch.cat(starts)


def new_bags(
    rows: Sequence[int], bags: int = 9, most: int = 6, dtype: torch.dtype = torch.int64
) -> Bags:
    """Bags of at most ``most`` indices of tables with ``rows`` rows; some bags are empty.

    The second table has only empty bags, and the last one has many duplicates.
    """
    indices, offsets = [], []
    for t, count in enumerate(rows):
        sizes = torch.randint(0, most + 1, (bags,)) if t != 1 else torch.zeros(bags).long()
        reach = min(count, 3) if t == len(rows) - 1 else count
        indices.append(torch.randint(reach, (int(sizes.sum()),), dtype=dtype))
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        offsets.append(ends.to(dtype))
    return Bags(indices, offsets)


def expected(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    mode: str = "sum",
    samples: Tensor | None = None,
    padding: int | None = None,
) -> Tensor:
    """The bags of one table, computed by torch."""
    return torch.nn.functional.embedding_bag(
        indices.long(),
        weight,
        offsets.long(),
        mode=mode,
        per_sample_weights=samples,
        padding_idx=padding,
        include_last_offset=True,
    )
