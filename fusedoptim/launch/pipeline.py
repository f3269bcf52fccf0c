"""The kernels of one update over the same chunks.

Most updates are one kernel. Lamb's are three: the second reads what the first has summed, the third
reads again what the first has read and written. Each goes through all tensors before the next
begins (docs/design/one-launch.md says why batches that fit a cache are not quicker).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fusedoptim.kernels.language import Role
from fusedoptim.launch.block import Chunks, LaunchBlock, row_addresses
from fusedoptim.launch.kernel import Kernel

# Up to as many chunks, addresses are written one by one: a call of numpy costs more than they do.
_FEW = 16


class Stage(Protocol):
    """What an update submits in its turn: a kernel, or a reduction of what one has summed."""

    @property
    def pending(self) -> Sequence[Any]:
        """Its events, of which the last may not have happened; empty if all have."""

    def launch(self, events: list[Any]) -> None:
        """Submit it, and append its event to ``events`` in the same C call."""

    def wait(self) -> None:
        """Return when it has ended."""


class Pipeline:
    """The launch blocks of an update's kernels, and the memory through which they pass sums."""

    def __init__(self, kernels: Sequence[Kernel], chunks: Chunks, device: torch.device) -> None:
        """Lay out the rows of ``kernels``, in order, for the chunks of tensors on ``device``."""
        self._blocks: list[LaunchBlock] = []
        self._with_column: dict[str, list[LaunchBlock]] = {}
        self._chunks = chunks
        self._is_few = len(chunks.owner) <= _FEW
        self._few_words: dict[str, list[tuple[LaunchBlock, list[tuple[int, int, int]]]]] = {}
        """For each column, in each block: word, tensor and element of every chunk."""
        real = getattr(torch, kernels[0].module.arithmetic)
        self.sums: Tensor | None = None
        """What each lane has summed over each chunk: (chunks and an unused one, lanes, values)."""
        self._results = torch.empty(len(chunks.counts), dtype=real, device=device)
        for kernel in kernels:
            self._add(kernel, chunks, real, device)
        if self._is_few:
            self._few_words = {column: self._words_of(column) for column in self._with_column}
        self.stages: list[Stage] = [block for block in self._blocks if block.rows]
        """What is submitted, in order."""

    def _add(self, kernel: Kernel, chunks: Chunks, real: torch.dtype, device: torch.device) -> None:
        roles = {role: name for name, role in kernel.layout.row}
        by_tensor = Role.CHUNK_SUMS in roles
        lanes = kernel.shape.lanes
        block = LaunchBlock(kernel, chunks.counts * lanes if by_tensor else chunks.lengths)
        self._blocks.append(block)
        if not by_tensor:
            for name, _ in kernel.layout.row:
                self._with_column.setdefault(name, []).append(block)
        if Role.POSITION in roles:
            block.write(roles[Role.POSITION], chunks.start)
        if Role.SUMS in roles:
            # The unused chunk is where an empty last tensor's sums would begin.
            shape = (block.rows + 1, lanes, kernel.module.sums)
            self.sums = torch.empty(shape, dtype=real, device=device)
            block.write(roles[Role.SUMS], row_addresses(self.sums)[:-1])
        if Role.CHUNK_SUMS in roles and self.sums is not None:
            block.write(roles[Role.CHUNK_SUMS], row_addresses(self.sums)[chunks.first])
        if Role.RESULT in roles:
            block.write(roles[Role.RESULT], row_addresses(self._results))
        if Role.ROW_RESULT in roles:
            block.write(roles[Role.ROW_RESULT], row_addresses(self._results)[chunks.owner])

    def write_flags(self, column: str, flags: Sequence[bool]) -> None:
        """Set a RowFlag of every chunk, from the flags of the tensors."""
        by_chunk = np.array(flags, dtype=np.int64)[self._chunks.owner]
        for block in self._with_column[column]:
            block.write(column, by_chunk)

    def write_scalars(self, columns: Mapping[str, np.ndarray[Any, Any] | float]) -> None:
        """Set RowScalars of every chunk: to a number for each tensor, or to one number for all."""
        for column, values in columns.items():
            if self._is_few and isinstance(values, float):
                for block, chunks in self._few_words[column]:
                    if block.pending:
                        block.wait()
                    reals, per_word = block.reals, block.reals_per_word
                    for word, _, _ in chunks:
                        reals[word * per_word] = values
            else:
                by_chunk = values if isinstance(values, float) else values[self._chunks.owner]
                for block in self._with_column[column]:
                    block.write(column, by_chunk)

    def write_addresses(self, column: str, addresses: Sequence[int], width: int) -> None:
        """Point one argument of every chunk to its elements of ``width`` bytes, by tensor."""
        if not self._is_few:
            base = np.array(addresses, dtype=np.uint64).view(np.int64)  # a GPU's may pass 2^63
            places = base[self._chunks.owner] + self._chunks.start * width
            for block in self._with_column[column]:
                block.write(column, places)
            return
        for block, chunks in self._few_words[column]:
            if block.pending:
                block.wait()
            for word, tensor, start in chunks:
                block.words[word] = addresses[tensor] + start * width

    def _words_of(self, column: str) -> list[tuple[LaunchBlock, list[tuple[int, int, int]]]]:
        owners, starts = self._chunks.owner.tolist(), self._chunks.start.tolist()
        found = []
        for block in self._with_column[column]:
            layout = block.kernel.layout
            first = layout.row_word[column]
            words = range(first, first + block.rows * layout.row_words, layout.row_words)
            found.append((block, list(zip(words, owners, starts))))
        return found

    def run(self) -> None:
        """Launch the kernels; on a GPU, return while they run."""
        events: list[Any] = []
        try:
            for stage in self.stages:
                stage.launch(events)
        finally:
            for block in self._blocks:
                if block.kernel.backend.runs_on_host:
                    block.wait()

    def launch_and_sum(self) -> Tensor:
        """Launch the kernels, and add up what they have summed over all chunks: a 0-d tensor."""
        self.run()
        assert self.sums is not None
        # torch divides a sum to one number among its threads, a sum over rows it does not.
        return self.sums[:-1].sum(0).sum()

    def write_head(self, values: Mapping[str, Any]) -> None:
        """Set the arguments that all chunks share."""
        for block in self._blocks:
            block.write_head(values)
