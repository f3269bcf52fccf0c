"""The kernels of one update over the same chunks, in cache-sized batches.

Most updates are one kernel, launched once. Lamb's are three, of which the last reads again what the
first has read and written: tensors go through all three in batches, so that a batch of small ones
is still in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from fusedoptim._launch import Chunks, Kernel, LaunchBlock, row_places
from fusedoptim.kernels.language import Role

# Bytes of the tensors in a batch. Lamb on 480 tensors of 100,000 elements takes 60 ms; 63 ms in one
# batch, as nothing is cached then, and 77 ms in batches of 2 MiB, for the launches. Tensors beyond
# the second-level cache gain nothing, walked forwards or backwards (two cores with 1 MiB each).
_BATCH = 4 * 1024 * 1024
_ALL = slice(None), slice(None)


class _Stage(NamedTuple):
    """One kernel of an update."""

    block: LaunchBlock
    by_tensor: bool
    """Whether a row is a whole tensor rather than a chunk."""


class Pipeline:
    """The launch blocks of an update's kernels, and the memory by which one tells the next."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        chunks: Chunks,
        bytes_per_element: int,
        device: torch.device,
    ) -> None:
        """Lay out the rows.

        Args:
            kernels: of the update, in order.
            chunks: of the tensors that they update.
            bytes_per_element: of all arrays together; decides how much makes a batch.
            device: of the tensors.
        """
        self._chunks = chunks
        batches = (
            list(self._in_batches(_BATCH // bytes_per_element)) if len(kernels) > 1 else [_ALL]
        )
        self._stages: list[_Stage] = []
        real = torch.float64 if kernels[0].real == np.float64 else torch.float32
        sums: torch.Tensor | None = None
        results = torch.empty(len(chunks.counts), dtype=real, device=device)
        for kernel in kernels:
            roles = {role: name for name, role in kernel.module.row}
            by_tensor = Role.CHUNK_SUMS in roles
            block = LaunchBlock(kernel, chunks.counts if by_tensor else chunks.lengths)
            self._stages.append(_Stage(block, by_tensor))
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
        self._with_column: dict[str, list[LaunchBlock]] = {}
        for block, by_tensor in self._stages:
            for name in () if by_tensor else block.kernel.row_names:
                self._with_column.setdefault(name, []).append(block)
        self._launches = [
            (block, rows)
            for tensors, chunks in batches
            for block, by_tensor in self._stages
            for rows in (tensors if by_tensor else chunks,)
            if range(*rows.indices(block.rows))
        ]
        self._has_begun = False
        self._events: list[Any] = []
        """of this step's launches so far."""

    def _in_batches(self, most: int) -> Iterator[tuple[slice, slice]]:
        """Tensors and their chunks, in portions of so many elements or one tensor."""
        ends = [*self._chunks.first.tolist(), len(self._chunks.owner)]
        first, elements = 0, 0
        for i, numel in enumerate(self._chunks.numels):
            if elements and elements + numel > most:
                yield slice(first, i), slice(ends[first], ends[i])
                first, elements = i, 0
            elements += numel
        yield slice(first, len(self._chunks.numels)), slice(ends[first], ends[-1])

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
        for block, _ in self._stages:
            block.write_head(block.kernel.in_order(values))

    def launch(self) -> None:
        """Submit all kernels; on a GPU, return while they run."""
        self._events = []
        self._has_begun = True
        self._submit()

    def _submit(self) -> None:
        for block, rows in self._launches[len(self._events) :]:
            block.launch(rows, self._events)

    @property
    def is_launched(self) -> bool:
        """Whether something was launched, or there is nothing to launch, since the last settle."""
        return self._has_begun and (bool(self._events) or not self._launches)

    def finish(self) -> None:
        """Submit what an interrupt kept back; on the CPU device, return when all has ended."""
        self._submit()
        for block, _ in self._stages:
            block.wait_on_host()

    def settle(self) -> None:
        """Count the step as taken."""
        self._has_begun = False
