"""The kernels of one update over the same chunks.

Most updates are one kernel. Lamb's are three: the second reads what the first has summed, the third
reads again what the first has read and written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fusedoptim.kernels.language import Role
from fusedoptim.launch.block import Chunks, LaunchBlock, as_int64, row_addresses
from fusedoptim.launch.kernel import Kernel

# Up to this many chunks, addresses are written one by one: a numpy call costs more.
_FEW = 16


class Stage(Protocol):
    """One thing that an update submits: a kernel, or a reduction of what a kernel has summed."""

    @property
    def pending(self) -> Sequence[Any]:
        """Its events; empty once all are known to have completed."""

    def launch(self, events: list[Any]) -> None:
        """Submit it, and append its event to ``events`` in the same C call."""

    def wait(self) -> None:
        """Return when it has ended."""


class Pipeline:
    """The launch blocks of an update's kernels, and the memory through which they pass sums."""

    def __init__(
        self,
        kernels: Sequence[Kernel],
        chunks: Chunks,
        device: torch.device,
        sums_elsewhere: bool = False,
    ) -> None:
        """Lay out the rows of ``kernels``, in order, for the chunks of tensors on ``device``.

        With ``sums_elsewhere``, other processes sum over other parts of the tensors. Kernels that
        use sums then find them in :attr:`totals`, which must be written in between.
        """
        self._blocks: list[LaunchBlock] = []
        self._with_column: dict[str, list[LaunchBlock]] = {}
        """For each column, the blocks that have it in a row for each chunk."""
        self._chunks = chunks
        self._is_few = len(chunks.owner) <= _FEW
        self._few_words: dict[str, list[tuple[LaunchBlock, list[tuple[int, int, int]]]]] = {}
        """For each column, in each block: word, tensor and element of every chunk."""
        self._few_reals: dict[str, list[tuple[LaunchBlock, memoryview[float], list[int]]]] = {}
        """For each column, in each block: where its numbers are."""
        real = getattr(torch, kernels[0].module.arithmetic)
        self.sums: Tensor | None = None
        """What each lane has summed over each chunk: (chunks and an unused one, lanes, values)."""
        for kernel in kernels:
            if kernel.module.sums:
                # The unused chunk is where an empty last tensor's sums would begin.
                shape = (len(chunks.owner) + 1, kernel.shape.lanes, kernel.module.sums)
                self.sums = torch.empty(shape, dtype=real, device=device)
        values = kernels[0].module.sums
        self.totals = torch.zeros(len(chunks.counts), values, dtype=real, device=device)
        """With ``sums_elsewhere``, the sums over each whole tensor: (tensors, values)."""
        self._sums_elsewhere = sums_elsewhere
        self._results = torch.empty(len(chunks.counts), dtype=real, device=device)
        for kernel in kernels:
            self._add(kernel)
        if self._is_few:
            self._few_words = {column: self._words_of(column) for column in self._with_column}
            self._few_reals = {
                column: [
                    (block, block.reals, [word * block.reals_per_word for word, _, _ in chunks])
                    for block, chunks in found
                ]
                for column, found in self._few_words.items()
            }
        self.nbytes = sum(block.nbytes for block in self._blocks)
        """Bytes of memory of its launch blocks."""
        self.stages: list[Stage] = [block for block in self._blocks if block.rows]
        """What is submitted, in order."""
        self.summing = int(bool(self._blocks[0].rows))
        """With ``sums_elsewhere``, how many stages come before :attr:`totals` must be written."""

    def _add(self, kernel: Kernel) -> None:
        """Lay out the rows of a kernel."""
        chunks = self._chunks
        roles = {role: name for name, role in kernel.layout.row}
        if Role.CHUNK_SUMS in roles and self._sums_elsewhere:
            block = LaunchBlock(kernel, np.ones(len(chunks.counts), dtype=np.int64))
            block.write(roles[Role.CHUNK_SUMS], row_addresses(self.totals))
        elif Role.CHUNK_SUMS in roles:
            lanes = kernel.backend.shape.lanes  # of the kernel that has summed
            block = LaunchBlock(kernel, chunks.counts * lanes)
            if self.sums is not None:
                block.write(roles[Role.CHUNK_SUMS], row_addresses(self.sums)[chunks.first])
        else:
            block = LaunchBlock(kernel, chunks.lengths)
            for name, _ in kernel.layout.row:
                self._with_column.setdefault(name, []).append(block)
        self._blocks.append(block)
        if Role.POSITION in roles:
            block.write(roles[Role.POSITION], chunks.start)
        if Role.SUMS in roles and self.sums is not None:
            block.write(roles[Role.SUMS], row_addresses(self.sums)[:-1])
        if Role.RESULT in roles:
            block.write(roles[Role.RESULT], row_addresses(self._results))
        if Role.ROW_RESULT in roles:
            block.write(roles[Role.ROW_RESULT], row_addresses(self._results)[chunks.owner])

    def while_running(self, action: Callable[[], object]) -> bool:
        """See :class:`fusedoptim.launch.block.LaunchBlock`; False if nothing is launched."""
        block = next((block for block in self._blocks if block.rows), None)
        if block is not None:
            block.while_running(action)
        return block is not None

    def write_integers(self, column: str, values: Sequence[int]) -> None:
        """Set a RowFlag or a ParamNumber of every chunk, from those of the tensors."""
        by_chunk = np.array(values, dtype=np.int64)[self._chunks.owner]
        for block in self._with_column[column]:
            block.write(column, by_chunk)

    def write_scalars(self, columns: Mapping[str, np.ndarray[Any, Any] | float]) -> None:
        """Set RowScalars of every chunk: to a number for each tensor, or to one number for all."""
        for column, values in columns.items():
            if self._is_few and isinstance(values, float):
                for block, reals, places in self._few_reals[column]:
                    if block.pending:
                        block.wait()
                    for place in places:
                        reals[place] = values
            else:
                by_chunk = values if isinstance(values, float) else values[self._chunks.owner]
                for block in self._with_column[column]:
                    block.write(column, by_chunk)

    def write_addresses(
        self, column: str, addresses: Sequence[int], width: int, elements: int = 1
    ) -> None:
        """Point one argument of every chunk to its values of ``width`` bytes, by tensor.

        One value serves ``elements`` elements.
        """
        if not self._is_few:
            places = (
                as_int64(addresses)[self._chunks.owner] + self._chunks.start // elements * width
            )
            for block in self._with_column[column]:
                block.write(column, places)
            return
        for block, chunks in self._few_words[column]:
            if block.pending:
                block.wait()
            for word, tensor, start in chunks:
                block.words[word] = addresses[tensor] + start // elements * width

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
        # torch divides a sum to one number among its threads, but not a sum over rows.
        return self.sums[:-1].sum(0).sum()

    def sums_by_tensor(self) -> Tensor:
        """What the first kernel has summed over each tensor: (tensors, values)."""
        assert self.sums is not None
        if self._blocks[0].kernel.backend.runs_on_host:
            self._blocks[0].wait()
        owners = torch.from_numpy(self._chunks.owner).to(self.sums.device)
        return torch.zeros_like(self.totals).index_add_(0, owners, self.sums[:-1].sum(1))

    def write_head(self, values: Mapping[str, Any]) -> None:
        """Set the arguments that all chunks share."""
        for block in self._blocks:
            block.write_head(values)
