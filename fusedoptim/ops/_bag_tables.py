"""The shapes of embedding tables, checked once for as long as the tables stay unchanged."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim._torch_private import BelowAutograd, TensorGuards
from fusedoptim.ops._bag_checks import check_updated, check_weights
from fusedoptim.ops._launching import ARITHMETIC_OF, VARIANT_OF
from fusedoptim.step.unchanged import tensor_guards

_MOST_KEPT = 256
_DTYPE = operator.attrgetter("dtype")
_known: dict[Any, tuple[TensorGuards, Tables]] = {}
"""Known tables, each with a check that all is unchanged. The key is the address of the first table,
the number of tables, and whether the CPU's autocast is on, as that changes what the check compares.
Where another device's is switched on or off, the check fails, and the tables are looked at anew."""


class Tables:
    """What is the same in every call with the same tables."""

    def __init__(
        self,
        rows: tuple[int, ...],
        widths: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        are_contiguous: bool,
    ) -> None:
        self.rows, self.widths = rows, np.array(widths, np.int64)
        self.are_contiguous = are_contiguous
        self.dtype, self.device = dtype, device
        self.itemsize = dtype.itemsize
        self.variant, self.real = VARIANT_OF[dtype], ARITHMETIC_OF[dtype]
        self._kind = rows, widths, dtype, device
        self._known: dict[int, Integers] = {}
        self._known_states: dict[Any, TensorGuards] = {}

    def is_like(self, other: Tables) -> bool:
        """Whether kernels read and write the same elements, in the same memory order or not."""
        return self is other or self._kind == other._kind

    def known(self, integers: Sequence[Tensor]) -> Integers | None:
        """What :meth:`remember` found for earlier tensors, if these are like them."""
        found = self._known.get(len(integers))
        return found if found is not None and found.guards.check(*integers) else None

    def remember(self, integers: Sequence[Tensor]) -> Integers:
        """Make :meth:`known` compare with these one-dimensional tensors, except for lengths."""
        self._known[len(integers)] = found = Integers(integers)
        return found

    def check_updated(
        self,
        weights: Sequence[Tensor],
        sums: Sequence[Tensor],
        trails: Sequence[Tensor],
        is_rowwise: bool,
    ) -> None:
        """Raise unless a kernel can update these tables, ``weights``, and their state in place."""
        if self.are_contiguous and not sums and not trails:
            return
        states, key = [*sums, *trails], (len(sums), len(trails), is_rowwise)
        known = self._known_states.get(key)
        with BelowAutograd():  # as in tables_of
            if known is None or not known.check(*states):
                check_updated(weights, sums, trails, is_rowwise)
                self._known_states[key] = tensor_guards(states)


class Integers:
    """What is the same for indices and offsets that differ only in their lengths."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        any_length: Any = [[None]] * len(tensors)
        dense: Any = [[1]] * len(tensors)
        self.guards = TensorGuards(
            *tensors, dynamic_dims_sizes=any_length, dynamic_dims_strides=dense
        )
        self.are_read_directly = are_read_directly(tensors)
        """Whether kernels read these tensors without a copy."""


def are_read_directly(integers: Sequence[Tensor]) -> bool:
    """Whether kernels read integers without a copy."""
    are_int64 = set(map(_DTYPE, integers)) == {torch.int64}
    return are_int64 and all(map(Tensor.is_contiguous, integers))


def tables_of(weights: Sequence[Tensor]) -> Tables:
    """The shapes of tables; raise if the operators do not accept them.

    Looking at each of some tens of tables takes as long as the kernels of a small batch.
    """
    address = weights[0].data_ptr() if weights else 0
    key = address, len(weights), torch.is_autocast_enabled("cpu")
    found = _known.get(key)
    with BelowAutograd():  # always, as autograd too changes what the check compares
        if found is not None and found[0].check(*weights):
            return found[1]
        check_weights(weights)
        rows, widths = zip(*[tuple(weight.shape) for weight in weights])
        are_contiguous = all(weight.is_contiguous() for weight in weights)
        tables = Tables(rows, widths, weights[0].dtype, weights[0].device, are_contiguous)
        if len(_known) >= _MOST_KEPT:
            _known.clear()
        _known[key] = tensor_guards(weights), tables
    return tables
