"""The shapes of embedding tables, checked once for as long as the tables stay unchanged."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim._torch_private import BelowAutograd, TensorGuards
from fusedoptim.ops._bag_checks import check_weights
from fusedoptim.ops._launching import ARITHMETIC_OF, VARIANT_OF
from fusedoptim.step.unchanged import tensor_guards

_MOST_KEPT = 256
_DTYPE = operator.attrgetter("dtype")
_known: dict[Any, tuple[TensorGuards, Tables]] = {}
"""Known tables, each with a check that all is unchanged. The key is the address of the first table,
the number of tables, and whether autocast is on, as that changes what the check compares."""


class Tables:
    """What is the same in every call with the same tables."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        check_weights(weights)
        self.rows, widths = zip(*[tuple(weight.shape) for weight in weights])
        self.widths = np.array(widths, np.int64)
        self.are_contiguous = all(weight.is_contiguous() for weight in weights)
        self.device, dtype = weights[0].device, weights[0].dtype
        self.itemsize = dtype.itemsize
        self.variant, self.real = VARIANT_OF[dtype], ARITHMETIC_OF[dtype]
        self._known: dict[int, Integers] = {}

    def known(self, integers: Sequence[Tensor]) -> Integers | None:
        """What :meth:`remember` found for earlier tensors, if these are like them."""
        found = self._known.get(len(integers))
        return found if found is not None and found.guards.check(*integers) else None

    def remember(self, integers: Sequence[Tensor]) -> Integers:
        """Make :meth:`known` compare with these one-dimensional tensors, except for lengths."""
        self._known[len(integers)] = found = Integers(integers)
        return found


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
        tables = Tables(weights)
        if len(_known) >= _MOST_KEPT:
            _known.clear()
        _known[key] = tensor_guards(weights), tables
    return tables
