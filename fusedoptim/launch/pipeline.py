"""The kernels of one update over the same chunks.

Most updates are one kernel, launched once. Lamb's are three, of which the last reads again what the
first has read and written. Each goes through all tensors before the next begins: in batches of
4 MiB, of which the cache may still have some, 16 cores took 1.2 to 1.5 times as long, and 2 cores
the same time but for many tensors of 100,000 elements, which took 0.95.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusedoptim.kernels.language import Role
from fusedoptim.launch.table import Chunks, Kernel, LaunchBlock, row_places


class Pipeline:
    """The launch blocks of an update's kernels, and the memory by which one tells the next."""

    def __init__(self, kernels: Sequence[Kernel], chunks: Chunks, device: torch.device) -> None:
        """Lay out the rows.

        Args:
            kernels: of the update, in order.
            chunks: of the tensors that they update.
            device: of the tensors.
        """
        self._blocks: list[LaunchBlock] = []
        self._with_column: dict[str, list[LaunchBlock]] = {}
        real = torch.float64 if kernels[0].real == np.float64 else torch.float32
        sums: torch.Tensor | None = None
        results = torch.empty(len(chunks.counts), dtype=real, device=device)
        for kernel in kernels:
            roles = {role: name for name, role in kernel.module.row}
            by_tensor = Role.CHUNK_SUMS in roles
            block = LaunchBlock(kernel, chunks.counts if by_tensor else chunks.lengths)
            self._blocks.append(block)
            for name in () if by_tensor else block.kernel.row_names:
                self._with_column.setdefault(name, []).append(block)
            if Role.SUMS in roles:
                # One more than there are chunks: where the sums of an empty last tensor would be.
                shape = (block.rows + 1, kernel.module.sums)
                sums = torch.empty(shape, dtype=real, device=device)
                block.write(roles[Role.SUMS], row_places(sums)[:-1])
            if Role.CHUNK_SUMS in roles and sums is not None:
                block.write(roles[Role.CHUNK_SUMS], row_places(sums)[chunks.first])
            if Role.RESULT in roles:
                block.write(roles[Role.RESULT], row_places(results))
            if Role.ROW_RESULT in roles:
                block.write(roles[Role.ROW_RESULT], row_places(results)[chunks.owner])
        self._scratch = (sums, results)
        self.to_launch = [block for block in self._blocks if block.rows]
        """Those of kernels with something to do, in order."""

    def write(self, column: str, values: Any) -> None:
        """Set one argument of all chunks, to one value or one for each, in each kernel with it."""
        for block in self._with_column[column]:
            block.write(column, values)

    def write_few(self, column: str, addresses: Sequence[int]) -> None:
        """Set one argument of few chunks, to an address for each, in each kernel with it."""
        for block in self._with_column[column]:
            block.write_few(column, addresses)

    def write_head(self, values: Mapping[str, Any]) -> None:
        """Set the arguments that are the same for all chunks."""
        for block in self._blocks:
            block.write_head(block.kernel.in_order(values))
