"""Where the indices of each table of a batch lie, and the work of sorting and reading them.

What depends on the tables and the numbers of bags is remembered, as numpy takes longer than many
kernels. Bags vary in length, so the numbers of indices may be new in each batch. What depends on
them is little, and is kept separately.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import Indices, as_int64
from fusedoptim.launch.devices import is_on_host
from fusedoptim.ops._bag_sorting import LINE, Sorting, digits_of, parts_of, work_of
from fusedoptim.ops._bag_tables import Tables, are_read_directly

_PART = 1 << 16
"""Elements of a part of a table's work, approximately."""
MOST_KEPT = 256
"""Shapes of batches that are remembered."""
_NONE = np.zeros(1, np.int64)
"""The address of something that no kernel reads."""


def addresses_of(tensors: Sequence[Tensor]) -> Indices:
    """The addresses of tensors."""
    return as_int64(list(map(Tensor.data_ptr, tensors)))


def _as_read(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Integers in the form in which kernels read them."""
    if are_read_directly(tensors):
        return tensors
    return [tensor.to(torch.int64).contiguous() for tensor in tensors]


class Batch:
    """The bags of all tables, as lists of a tensor for each table, or of one tensor for all.

    In one tensor for all, the offsets of each table follow those of the previous table, and all
    count from the beginning of the indices.
    """

    def __init__(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        sample_weights: Sequence[Tensor],
        tables: Tables,
        has_last_offset: bool,
        is_read_directly: bool = False,
    ) -> None:
        """Read the bags; ``is_read_directly`` says that all integers are known to need no copy."""
        self.tables = tables
        self._indices, self._offsets = indices, offsets
        if not is_read_directly:
            self._indices, self._offsets = _as_read(indices), _as_read(offsets)
        self.sample_weights = sample_weights
        self._counts, starts = (tuple(map(Tensor.numel, own)) for own in (indices, offsets))
        self.shape = _shape_of(len(indices), starts, len(tables.rows), int(has_last_offset))
        self.ends = np.array(self._counts)[self.shape.tensor]
        """Where each table's last bag ends, counted as its offsets are."""

    def addresses(self, tensor: Indices) -> dict[str, Indices]:
        """The addresses for rows of a launch that read from these of the batch's tensors."""
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
            return self._counts
        (offsets,), bags, tables = self._offsets, int(shape.bags[0]), len(shape.bags)
        if not bags:
            return (0,) * tables
        starts = offsets[: bags * tables : bags].tolist()
        last = offsets[-1:].tolist() if len(offsets) > bags * tables else [*self._counts]
        return tuple(np.diff([*starts, *last]).tolist())

    def mean_sizes(self) -> tuple[int, ...]:
        """:meth:`sizes` without reading them: the same for all tables that share a tensor."""
        if not self.shape.is_joined:
            return self._counts
        tables = len(self.ends)
        return (self._counts[0] // tables,) * tables


class Shape:
    """What the numbers of offsets say about each table."""

    def __init__(
        self, tensors: int, offset_counts: tuple[int, ...], tables: int, last: int
    ) -> None:
        repeats = tables // tensors
        self.is_joined = tensors < tables
        """Whether one tensor has the indices of all tables."""
        self.tensor = np.repeat(np.arange(tensors), repeats)
        """The tensor that has the table's indices."""
        offsets = np.array(offset_counts)[self.tensor]
        self.bags = (offsets - last) // repeats
        self.bags_of_tensor = [(count - last) // repeats for count in offset_counts]
        """For each tensor, the bags of each of its tables."""
        self.before = np.arange(tables) * self.bags * self.is_joined
        """Offsets before the table's first in the same tensor."""
        self.bags_left = offsets - self.before
        """Offsets from the table's first on."""


_shape_of = functools.lru_cache(MOST_KEPT)(Shape)


class Cut(NamedTuple):
    """About equal parts of tables, for a launch with a row for each part."""

    parts: int
    """The number of parts of each table."""
    length: int
    """Elements of a part, approximately."""

    def tables(self, tables: int) -> Indices:
        """The table of each part."""
        return np.repeat(np.arange(tables), self.parts)

    def bounds(self, sizes: Indices) -> tuple[Indices, Indices]:
        """Where each part begins and ends among the bags or indices of its table."""
        cuts = sizes[:, None] * np.arange(self.parts + 1) // self.parts
        return cuts[:, :-1].ravel(), cuts[:, 1:].ravel()


@functools.lru_cache(MOST_KEPT)
def cut_of(tables: Tables, sizes: tuple[int, ...]) -> Cut:
    """How to cut the work of adding up rows, for ``sizes`` indices of each table."""
    elements = np.array(sizes) * tables.widths
    # Powers of two, so that batches of about the same size share what is remembered.
    parts = 1 << max(int(elements.max()) // _PART, 1).bit_length() - 1
    each = int(elements.sum()) // (parts * len(elements))
    return Cut(parts, 1 << each.bit_length())


class Layout:
    """What sorts of about equal work have in common, for batches of the same shape and options."""

    def __init__(
        self,
        shape: Shape,
        paddings: tuple[int, ...],
        means: tuple[bool, ...],
        is_weighted: bool,
        device: torch.device,
        real: torch.dtype,
        work: int,
    ) -> None:
        self.means = np.array(means, np.int64)
        self.has_means = any(means) and not is_weighted
        self.is_weighted = int(is_weighted)
        self.tensor, self.is_joined = shape.tensor, shape.is_joined
        self.before = 8 * shape.before
        """Bytes before the table's offsets in their tensor."""
        self.count = 8 * LINE * np.arange(len(means))
        """Bytes before the table's number of sorted keys."""
        bags_before = np.cumsum(shape.bags) - shape.bags
        self.factors, self.factor = int(shape.bags.sum()) + 1, real.itemsize * bags_before
        """The number of factors of all tables, and the bytes before each table's."""
        columns = {
            "length": np.full(len(means), work),
            "bags": shape.bags,
            "bags_left": shape.bags_left,
            "padding": np.array(paddings),
            "is_weighted": self.is_weighted,
            "is_mean": self.means,
        }
        self.sorting = Sorting(device, real, columns)


class Places:
    """Where the keys of each table's indices lie, before and after they are sorted."""

    def __init__(self, sizes: tuple[int, ...], table_rows: tuple[int, ...], threads: int) -> None:
        self.counts, self.sizes = sizes, np.array(sizes)
        """Indices of each table."""
        parts = parts_of(self.sizes, threads)
        self.parts = parts if parts.max(initial=1) > 1 else None
        """The number of parts of each table that work items sort; None if it is 1 for all."""
        self.room = max(sum(sizes), 1)
        """Integers for the keys of all tables."""
        self.unsorted = 8 * (np.cumsum(self.sizes) - self.sizes)
        """Bytes before the table's keys, in a memory of twice this room."""
        self.spare = self.unsorted + 8 * self.room
        self.digits = digits_of(sizes, table_rows)
        self.sorted = np.where(self.digits.are_moved_back, self.unsorted, self.spare)
        """Bytes before the table's sorted keys."""


_places_of = functools.lru_cache(MOST_KEPT)(Places)
_layout_of = functools.lru_cache(MOST_KEPT)(Layout)


class Sorted:
    """The indices of a batch, sorted: where the keys of each table lie."""

    def __init__(self, batch: Batch, paddings: Sequence[int], means: Sequence[bool]) -> None:
        """Sort.

        Args:
            batch: whose indices are sorted.
            paddings: the index of each table that is ignored, or -1.
            means: whether each table's bags are means.
        """
        tables, is_weighted = batch.tables, bool(batch.sample_weights)
        device, real = tables.device, tables.real
        sizes = batch.sizes()
        threads = torch.get_num_threads() if is_on_host(device) else 1
        self.places = places = _places_of(sizes, tables.rows, threads)
        options = tuple(paddings), tuple(means), is_weighted, device, real
        self.layout = layout = _layout_of(batch.shape, *options, work_of(places.room, len(sizes)))
        self._batch = batch
        self._keys = torch.empty(2, places.room, dtype=torch.int64, device=device)
        self._counts = torch.empty(len(sizes), LINE, dtype=torch.int64, device=device)
        keys, counts = addresses_of([self._keys, self._counts])
        self.keys = keys + places.sorted
        """The address of each table's sorted keys."""
        columns = batch.addresses(layout.tensor)
        columns["offsets"] += layout.before
        self.factors = columns.pop("weights", _NONE)
        """The addresses of each table's factors, or 0."""
        self.bags_of = _NONE
        """Addresses of the bags by position, as a weighted table's keys have positions; or 0."""
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
            "count": batch.ends,
            "keys": keys + places.unsorted,
            "spare": keys + places.spare,
            "factors": self.factors,
            "bags_of": self.bags_of,
            "sorted_count": self.counts,
        }
        layout.sorting.run(places.sizes, places.digits, places.parts, columns)

    def addresses(self, table: Indices) -> dict[str, Any]:
        """The addresses for rows of a launch that walk the keys of these tables."""
        found = {"keys": self.keys[table], "sorted_count": self.counts[table]}
        for name, places in (("factors", self.factors), ("bags_of", self.bags_of)):
            found[name] = places if places is _NONE else places[table]
        return found
