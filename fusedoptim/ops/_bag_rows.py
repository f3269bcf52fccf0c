"""Runs a kernel over the rows of embedding tables that occur in a batch, with their gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import Indices, row_addresses
from fusedoptim.ops._bag_batch import MOST_KEPT, Batch, Cut, Layout, Sorted, addresses_of, cut_of
from fusedoptim.ops._bag_tables import Tables
from fusedoptim.ops._launching import TableLaunch

ROWWISE = "rowwise_adagrad_rows"
"""The kernel that needs room for a row."""
_LINE = 16
"""Elements that fill at least a cache line."""

Tensors = Sequence[Tensor]


def columns_before(widths: Indices, is_joined: bool) -> Indices:
    """Columns before each table's in the tensor with its bags."""
    before: Indices = (np.cumsum(widths) - widths) * is_joined
    return before


class _Walk:
    """The launch that walks the sorted indices of batches of the same shape and options."""

    def __init__(self, layout: Layout, cut: Cut, tables: Tables, name: str, variant: str) -> None:
        widths = tables.widths
        self.table = of = cut.tables(len(widths))
        """The table of each row of the launch."""
        self.tensor = layout.tensor[of]
        """The tensor with the gradients of the table's bags."""
        columns = columns_before(widths, layout.is_joined)
        self.grad = columns[of] * tables.itemsize
        """Bytes before these gradients in their tensor."""
        fixed = {
            "length": np.full(len(of), cut.length),
            "width": widths[of],
            "is_weighted": layout.is_weighted,
            "is_mean": layout.means[of],
        }
        self.room = 0
        """Elements that a row needs."""
        if name == ROWWISE:
            self.room = -(-int(widths.max()) // _LINE) * _LINE
            fixed["one_over_width"] = 1 / np.maximum(widths, 1)[of]
        self.launch = TableLaunch(name, tables.device, variant, fixed)


_walk_of = functools.lru_cache(MOST_KEPT)(_Walk)


class Gradient:
    """The gradients of a batch's bags, and its indices, sorted."""

    def __init__(
        self,
        grads: Tensors,
        batch: Batch,
        means: Sequence[bool],
        paddings: Sequence[int],
    ) -> None:
        self._grads = _with_rows(grads)
        self._tables = batch.tables
        self._sorted = Sorted(batch, paddings, means)

    def walk(
        self, name: str, variant: str, columns: Mapping[str, Tensors], numbers: Mapping[str, float]
    ) -> None:
        """Run a kernel over all rows that occur; ``columns`` have the arguments of each table."""
        tables, places = self._tables, self._sorted.places
        cut = cut_of(tables, places.counts)
        walk = _walk_of(self._sorted.layout, cut, tables, name, variant)
        strides = np.array([grad.stride(0) for grad in self._grads])
        walking = self._sorted.addresses(walk.table)
        walking["grad"] = addresses_of(self._grads)[walk.tensor] + walk.grad
        walking["stride"] = strides[walk.tensor]
        walking["first"], walking["last"] = cut.bounds(places.sizes)
        for column, tensors in columns.items():
            walking[column] = addresses_of(tensors)[walk.table]
        if walk.room:
            shape = len(walk.table), walk.room
            room = torch.empty(shape, dtype=tables.real, device=tables.device)
            walking["row_grad"] = row_addresses(room)
        walk.launch.run(walking, numbers)


def _with_rows(grads: Tensors) -> Tensors:
    """Gradients whose rows are consecutive elements each."""
    if {strides[1] for strides in map(Tensor.stride, grads)} == {1}:
        return grads
    return [x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous() for x in grads]
