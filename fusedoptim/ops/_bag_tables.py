"""The shapes of embedding tables, checked once for as long as the tables stay as they are."""

from __future__ import annotations

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
_known: dict[Any, tuple[TensorGuards, Tables]] = {}
"""With a check that all is as it was, by the address of the first table, their number, and whether
autocast is on, as the check takes that for another kind of tensor."""


class Tables:
    """What is the same in each call for some tables."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        check_weights(weights)
        self.rows, widths = zip(*[tuple(weight.shape) for weight in weights])
        self.widths = np.array(widths, np.int64)
        self.are_contiguous = all(weight.is_contiguous() for weight in weights)
        self.device, dtype = weights[0].device, weights[0].dtype
        self.itemsize = dtype.itemsize
        self.variant, self.real = VARIANT_OF[dtype], ARITHMETIC_OF[dtype]
        self._guards: dict[int, TensorGuards] = {}

    def are_as_before(self, integers: Sequence[Tensor]) -> bool:
        """Whether tensors are as earlier ones that :meth:`remember` got, but for their lengths."""
        guards = self._guards.get(len(integers))
        return guards is not None and bool(guards.check(*integers))

    def remember(self, integers: Sequence[Tensor]) -> None:
        """Have :meth:`are_as_before` compare with these tensors of one dimension."""
        any_length: Any = [[None]] * len(integers)
        dense: Any = [[1]] * len(integers)
        self._guards[len(integers)] = TensorGuards(
            *integers, dynamic_dims_sizes=any_length, dynamic_dims_strides=dense
        )


def tables_of(weights: Sequence[Tensor]) -> Tables:
    """The shapes of tables; raise if the operators do not take them.

    To look at each of some tens of tables takes as long as a small batch's kernels do.
    """
    address = weights[0].data_ptr() if weights else 0
    key = address, len(weights), torch.is_autocast_enabled("cpu")
    found = _known.get(key)
    with BelowAutograd():  # the check takes a pass without autograd for another kind of tensor
        if found is not None and found[0].check(*weights):
            return found[1]
        tables = Tables(weights)
        if len(_known) >= _MOST_KEPT:
            _known.clear()
        _known[key] = tensor_guards(weights), tables
    return tables
