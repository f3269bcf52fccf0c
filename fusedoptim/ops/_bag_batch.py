"""Where the indices of each table of a batch lie, and the work of sorting and reading them.

What follows from the shapes of a batch is remembered: numpy takes longer than many kernels.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import Indices, as_int64
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.ops._bag_sorting import LINE, Sorting

_PART = 1 << 16
"""Elements of a part of a table's work, about."""
MOST_KEPT = 256
"""Shapes of batches that are remembered."""
_DTYPE = operator.attrgetter("dtype")
_NONE = np.zeros(1, np.int64)
"""The address of what no kernel reads."""


def addresses_of(tensors: Sequence[Tensor]) -> Indices:
    """The addresses of tensors."""
    return as_int64(list(map(Tensor.data_ptr, tensors)))


def _as_read(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Integers as kernels read them."""
    if set(map(_DTYPE, tensors)) == {torch.int64} and all(map(Tensor.is_contiguous, tensors)):
        return tensors
    return [tensor.to(torch.int64).contiguous() for tensor in tensors]


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
        self.device = indices[0].device
        self._indices, self._offsets = _as_read(indices), _as_read(offsets)
        self.sample_weights = sample_weights
        counts = [tuple(map(Tensor.numel, tensors)) for tensors in (indices, offsets)]
        self.shape = _shape_of(*counts, tables, int(has_last_offset))

    def addresses(self, tensor: Indices) -> dict[str, Indices]:
        """Those of rows of a launch that read from these of the batch's tensors."""
        addresses = {
            "indices": addresses_of(self._indices)[tensor],
            "offsets": addresses_of(self._offsets)[tensor],
        }
        if self.sample_weights:
            addresses["weights"] = addresses_of(self.sample_weights)[tensor]
        return addresses

    def sizes(self) -> tuple[int, ...]:
        """The number of indices of each table."""
        shape = self.shape
        if not shape.is_joined:
            return shape.sizes
        (offsets,), bags, tables = self._offsets, int(shape.bags[0]), len(shape.bags)
        if not bags:
            return (0,) * tables
        starts = offsets[: bags * tables : bags].tolist()
        last = offsets[-1:].tolist() if len(offsets) > bags * tables else [int(shape.counts[0])]
        return tuple(np.diff([*starts, *last]).tolist())


class Shape:
    """What the numbers of indices and offsets say of each table."""

    def __init__(
        self, index_counts: tuple[int, ...], offset_counts: tuple[int, ...], tables: int, last: int
    ) -> None:
        repeats = tables // len(index_counts)
        counts, offsets = (np.repeat(np.array(x), repeats) for x in (index_counts, offset_counts))
        self.is_joined = len(index_counts) < tables
        """Whether one tensor has the indices of all tables."""
        self.sizes = index_counts
        """The number of indices in each tensor."""
        self.tensor = np.repeat(np.arange(len(index_counts)), repeats)
        """Which of them has the table's."""
        self.bags = (offsets - last) // repeats
        self.before = np.arange(tables) * self.bags * (repeats > 1)
        """Offsets before the table's first, in the tensor of both."""
        self.bags_left = offsets - self.before
        """Offsets from the table's first on."""
        self.counts = counts
        """Where the last bag ends, counted as offsets are."""

    def parts(self, widths: Indices) -> Parts:
        """Cut each table's bags into about equal parts, as many of each table."""
        elements = self.counts * widths // (len(self.bags) if self.is_joined else 1)
        return parts_of(self.bags, elements)


_shape_of = functools.lru_cache(MOST_KEPT)(Shape)


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


class Layout:
    """The memory of a sort and its arguments, for batches of the same shape and options."""

    def __init__(
        self,
        shape: Shape,
        sizes: tuple[int, ...],
        table_rows: tuple[int, ...],
        paddings: tuple[int, ...],
        means: tuple[bool, ...],
        is_weighted: bool,
        device: torch.device,
        real: torch.dtype,
        threads: int,
    ) -> None:
        self.sizes = np.array(sizes, np.int64)
        self.room = max(int(self.sizes.sum()), 1)
        """Integers for the keys of all tables."""
        self.means = np.array(means, np.int64)
        self.has_means = any(means) and not is_weighted
        self.is_weighted = int(is_weighted)
        self.tensor, self.is_joined = shape.tensor, shape.is_joined
        self.before = 8 * shape.before
        """Bytes before the table's offsets, in the tensor of both."""
        self.unsorted = 8 * (np.cumsum(self.sizes) - self.sizes)
        """Bytes before the table's keys, in a memory of twice this room."""
        self.spare = self.unsorted + 8 * self.room
        self.count = 8 * LINE * np.arange(len(sizes))
        """Bytes before the number of its sorted keys."""
        bags_before = np.cumsum(shape.bags) - shape.bags
        self.factors, self.factor = int(shape.bags.sum()) + 1, real.itemsize * bags_before
        """Factors of all tables, and bytes before this one's."""
        columns = {
            "bags": shape.bags,
            "bags_left": shape.bags_left,
            "count": shape.counts,
            "padding": np.array(paddings),
            "is_weighted": self.is_weighted,
            "is_mean": self.means,
        }
        rows = np.array(table_rows, np.int64)
        self.sorting = Sorting(device, real, self.sizes, rows, threads, columns)
        self.sorted = np.where(self.sorting.passes % 2 == 0, self.unsorted, self.spare)
        """Bytes before the table's sorted keys."""


_layout_of = functools.lru_cache(MOST_KEPT)(Layout)


class Sorted:
    """The indices of a batch, sorted: where the keys of each table lie."""

    def __init__(
        self,
        batch: Batch,
        table_rows: Sequence[int],
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
        device, is_weighted = batch.device, bool(batch.sample_weights)
        options = tuple(table_rows), tuple(paddings), tuple(means), is_weighted
        threads = torch.get_num_threads() if BACKENDS[device.type].runs_on_host else 1
        self.layout = layout = _layout_of(
            batch.shape, batch.sizes(), *options, device, real, threads
        )
        self._batch = batch
        self._keys = torch.empty(2, layout.room, dtype=torch.int64, device=device)
        self._counts = torch.empty(len(layout.sizes), LINE, dtype=torch.int64, device=device)
        keys, counts = addresses_of([self._keys, self._counts])
        self.keys = keys + layout.sorted
        """The address of each table's sorted keys."""
        columns = batch.addresses(layout.tensor)
        columns["offsets"] += layout.before
        self.factors = columns.pop("weights", _NONE)
        """The addresses of each table's factors, or 0."""
        self.bags_of = _NONE
        """Where the bags are of the positions that a weighted table's keys have, or 0."""
        self.counts = counts + layout.count
        """The address of the number of each table's keys, without padding."""
        if is_weighted:
            self._bags_of = [
                torch.empty(max(len(w), 1), dtype=torch.int64, device=device)
                for w in batch.sample_weights
            ]
            self.bags_of = addresses_of(self._bags_of)[layout.tensor]
        elif layout.has_means:
            self._factors = torch.empty(layout.factors, dtype=real, device=device)
            self.factors = addresses_of([self._factors])[0] + layout.factor
        columns |= {
            "keys": keys + layout.unsorted,
            "spare": keys + layout.spare,
            "factors": self.factors,
            "bags_of": self.bags_of,
            "sorted_count": self.counts,
        }
        layout.sorting.run(columns)

    def addresses(self, table: Indices) -> dict[str, Any]:
        """Those of rows of a launch that walk the keys of these tables."""
        found = {"keys": self.keys[table], "sorted_count": self.counts[table]}
        for name, places in (("factors", self.factors), ("bags_of", self.bags_of)):
            found[name] = places if places is _NONE else places[table]
        return found
