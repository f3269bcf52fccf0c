"""The rows that a sparse gradient touches, and where in memory the gradient of each is."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fusedoptim.launch.block import Indices, row_addresses


class SparseGradient:
    """A sparse COO gradient, with one address for each row that it touches.

    Rows in rising order, such as those of a coalesced gradient, are used where they lie. So are
    rows that occur once. Only repeated rows are summed, which is cheaper than coalescing all.
    """

    def __init__(self, grad: Tensor) -> None:
        self.sparse_dim = grad.sparse_dim()
        self.values = grad._values().detach().resolve_conj().resolve_neg().contiguous()
        self._sums = self.values[:0]
        self._once: Indices | None = None
        """Indices of the values whose rows occur once; None if all do."""
        numbers = row_numbers(grad._indices(), grad.shape)
        if (numbers[1:] > numbers[:-1]).all():
            self.rows = numbers
            """Numbers of the rows, in rising order."""
            self.addresses = row_addresses(self.values)
            """The address of each row's gradient."""
            return
        order = stable_order(numbers)
        numbers = numbers[order]
        firsts = np.flatnonzero(np.append(True, numbers[1:] != numbers[:-1]))
        self.rows = numbers[firsts]
        self.addresses = row_addresses(self.values, order[firsts])
        if len(firsts) < len(numbers):
            self._sum_repeated(order, firsts)

    def _sum_repeated(self, order: Indices, firsts: Indices) -> None:
        """Sum the rows that occur more than once, in their order in the gradient."""
        counts = np.diff(firsts, append=len(order))
        occurs_again = counts > 1
        self._once = order[firsts[~occurs_again]]
        parts = torch.from_numpy(order[np.repeat(occurs_again, counts)])
        counts = counts[occurs_again]
        starts = torch.from_numpy(np.cumsum(counts) - counts)
        is_complex, device = self.values.is_complex(), self.values.device
        values = torch.view_as_real(self.values) if is_complex else self.values
        # embedding_bag sums gathered rows, and is faster than index_add_.
        sums = torch.nn.functional.embedding_bag(
            parts.to(device),
            values.reshape(len(values), math.prod(values.shape[1:])),
            starts.to(device),
            mode="sum",
        ).reshape(len(starts), *values.shape[1:])
        self._sums = torch.view_as_complex(sums) if is_complex else sums
        self.addresses[occurs_again] = row_addresses(self._sums)

    def sum_of_squares(self, dtype: torch.dtype) -> Tensor:
        """The squares of the elements, repeated rows summed first, added up in ``dtype``."""
        values = self.values
        if self._once is not None:
            once = torch.from_numpy(self._once).to(values.device)
            values = torch.cat([values[once], self._sums])
        reals = torch.view_as_real(values) if values.is_complex() else values
        return reals.to(dtype).square().sum()


def stable_order(numbers: Indices) -> Indices:
    """The stable argsort of non-negative numbers, 16 bits at a time, which numpy sorts by radix."""
    order = np.argsort(numbers.astype(np.uint16), kind="stable")
    for shift in range(16, int(numbers.max()).bit_length(), 16):
        digits = (numbers >> shift).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def row_numbers(indices: Tensor, shape: torch.Size) -> Indices:
    """The number of each row in ``indices``, counted over all sparse dimensions of ``shape``."""
    by_dimension = indices.cpu().numpy()
    for of, size in zip(by_dimension, shape):
        if len(of) and not 0 <= of.min() <= of.max() < size:
            raise IndexError(
                f"a sparse gradient of shape {tuple(shape)} has an index beyond it; the indices "
                "given to the embedding must be below its number of rows"
            )
    numbers: Indices = by_dimension[0]
    for of, size in zip(by_dimension[1:], shape[1:]):
        numbers = numbers * size + of
    return numbers
