"""Where the indices of each table of a batch lie, and the work of sorting and reading them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import Indices, as_int64
from fusedoptim.ops._bag_sorting import LINE, digits_of, sort

_PART = 1 << 16
"""Elements of a part of a table's work, about."""
_MOST_KEPT = 256
"""Shapes of batches for which parts are remembered: numpy takes longer than many kernels."""


def addresses_of(tensors: Sequence[Tensor]) -> Indices:
    """The addresses of tensors."""
    return as_int64([tensor.data_ptr() for tensor in tensors])


def _as_int64(tensor: Tensor) -> Tensor:
    if tensor.dtype is not torch.int64:
        tensor = tensor.to(torch.int64)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


class Batch:
    """The bags of all tables, as lists of a tensor for each table, or of one tensor for all.

    In one tensor for all, the offsets of each table follow those of the table before, and all count
    from the beginning of the indices.
    """

    def __init__(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        sample_weights: Sequence[Tensor],
        tables: int,
        has_last_offset: bool,
    ) -> None:
        self.tables = tables
        self.device = indices[0].device
        self.is_joined = len(indices) < tables
        self._indices = [_as_int64(tensor) for tensor in indices]
        self._offsets = [_as_int64(tensor) for tensor in offsets]
        self.sample_weights = sample_weights
        index_counts = tuple([tensor.numel() for tensor in indices])
        offset_counts = tuple([tensor.numel() for tensor in offsets])
        self.bags, self.bags_left, self.counts, before = _shape_of(
            index_counts, offset_counts, tables, int(has_last_offset)
        )
        self.index_addresses = self._of_tables(self._indices)
        self.offset_addresses = self._of_tables(self._offsets) + 8 * before
        self.weight_addresses = self._of_tables(sample_weights) if sample_weights else 0 * before

    def _of_tables(self, tensors: Sequence[Tensor]) -> Indices:
        """The address of each table's tensor."""
        return np.repeat(addresses_of(tensors), self.tables if self.is_joined else 1)

    @property
    def columns(self) -> dict[str, Any]:
        """The arguments of kernels that walk all bags of each table, but for their results."""
        return {
            "indices": self.index_addresses,
            "offsets": self.offset_addresses,
            "bags": self.bags,
            "bags_left": self.bags_left,
            "count": self.counts,
        }

    def sizes(self) -> Indices:
        """The number of indices of each table."""
        if not self.is_joined:
            return self.counts
        (offsets,), bags = self._offsets, int(self.bags[0])
        if not bags:
            return np.zeros(self.tables, np.int64)
        starts = offsets[: bags * self.tables : bags].tolist()
        last = offsets[-1:].tolist() if len(offsets) > bags * self.tables else self.counts[:1]
        return np.diff([*starts, *last])

    def parts(self, widths: Indices) -> Parts:
        """Cut each table's bags into about equal parts, as many of each table."""
        elements = self.counts * widths // (self.tables if self.is_joined else 1)
        return parts_of(self.bags, elements)


class _Shape(NamedTuple):
    """What the numbers of indices and offsets say of each table."""

    bags: Indices
    bags_left: Indices
    """Offsets from the table's first on."""
    counts: Indices
    """Where the last bag ends, counted as offsets are."""
    before: Indices
    """Offsets before the table's first, in the tensor of both."""


@functools.lru_cache(_MOST_KEPT)
def _shape_of(
    index_counts: tuple[int, ...], offset_counts: tuple[int, ...], tables: int, last: int
) -> _Shape:
    repeats = tables // len(index_counts)
    counts, offsets = (np.repeat(np.array(x), repeats) for x in (index_counts, offset_counts))
    bags = (offsets - last) // repeats
    before = np.arange(tables) * bags if repeats > 1 else np.zeros(tables, np.int64)
    return _Shape(bags, offsets - before, counts, before)


class Parts(NamedTuple):
    """Parts of all tables, as many of each."""

    table: Indices
    """Of each part."""
    begin: Indices
    """What part of the table's bags or indices."""
    end: Indices
    length: Indices
    """Work, in elements."""


def parts_of(sizes: Indices, elements: Indices) -> Parts:
    """Cut tables of so many bags or indices, with so many elements to add."""
    return _parts_of(sizes.tobytes(), elements.tobytes())


@functools.lru_cache(_MOST_KEPT)
def _parts_of(size_bytes: bytes, element_bytes: bytes) -> Parts:
    sizes, elements = np.frombuffer(size_bytes, np.int64), np.frombuffer(element_bytes, np.int64)
    most = int(elements.max(initial=0))
    # A power of two: launch blocks of few sizes are kept.
    each = 1 << max(most // _PART, 1).bit_length() - 1
    cuts = sizes[:, None] * np.arange(each + 1) // each
    return Parts(
        np.repeat(np.arange(len(sizes)), each),
        cuts[:, :-1].ravel(),
        cuts[:, 1:].ravel(),
        np.repeat(elements // each + 1, each),
    )


class Sorted:
    """The indices of a batch, sorted: where the keys of each table lie."""

    def __init__(
        self,
        batch: Batch,
        table_rows: Indices | Sequence[int],
        paddings: Sequence[int],
        means: Sequence[bool],
        real: torch.dtype,
    ) -> None:
        """Sort.

        Args:
            batch: whose indices are sorted.
            table_rows: rows of each table.
            paddings: the index of each table that counts for nothing, or -1.
            means: whether each table's bags are means.
            real: the dtype of factors.
        """
        self.sizes = sizes = batch.sizes()
        self._batch, self.means = batch, np.array(means, np.int64)
        self.is_weighted = int(bool(batch.sample_weights))
        device, total = batch.device, int(sizes.sum())
        digit_bits, passes = _digits_of(sizes.tobytes(), np.asarray(table_rows, np.int64).tobytes())
        self._keys = torch.empty(2, max(total, 1), dtype=torch.int64, device=device)
        self._counts = torch.empty(batch.tables, LINE, dtype=torch.int64, device=device)
        first = np.cumsum(sizes) - sizes
        unsorted, spare = (addresses_of([row])[0] + 8 * first for row in self._keys)
        self.keys = np.where(passes % 2 == 0, unsorted, spare)
        """The address of each table's sorted keys."""
        self.counts = addresses_of([self._counts])[0] + 8 * LINE * np.arange(batch.tables)
        """The address of their number, without padding."""
        self.bags_of = self.factors = np.zeros(batch.tables, np.int64)
        if self.is_weighted:
            self._bags_of = [
                torch.empty(max(len(w), 1), dtype=torch.int64, device=device)
                for w in batch.sample_weights
            ]
            repeats = batch.tables if batch.is_joined else 1
            self.bags_of = np.repeat(addresses_of(self._bags_of), repeats)
            self.factors = batch.weight_addresses
        elif self.means.any():
            self._factors = torch.empty(int(batch.bags.sum()) + 1, dtype=real, device=device)
            before = np.cumsum(batch.bags) - batch.bags
            self.factors = addresses_of([self._factors])[0] + real.itemsize * before
        tables = {
            **batch.columns,
            "keys": unsorted,
            "spare": spare,
            "factors": self.factors,
            "bags_of": self.bags_of,
            "sorted_count": self.counts,
            "padding": np.array(paddings),
            "passes": passes,
            "digit_bits": digit_bits,
            "is_weighted": self.is_weighted,
            "is_mean": self.means,
        }
        sort(device, real, sizes, tables)

    def walking(self, widths: Indices) -> tuple[Indices, dict[str, Any]]:
        """Parts that cover the keys of tables of these widths: the table of each, and arguments."""
        parts = parts_of(self.sizes, self.sizes * widths)
        of = parts.table
        return of, {
            "length": parts.length,
            "keys": self.keys[of],
            "factors": self.factors[of],
            "bags_of": self.bags_of[of],
            "sorted_count": self.counts[of],
            "first": parts.begin,
            "last": parts.end,
            "width": widths[of],
            "is_weighted": self.is_weighted,
            "is_mean": self.means[of],
        }


@functools.lru_cache(_MOST_KEPT)
def _digits_of(sizes: bytes, table_rows: bytes) -> tuple[Indices, Indices]:
    return digits_of(np.frombuffer(sizes, np.int64), np.frombuffer(table_rows, np.int64))
