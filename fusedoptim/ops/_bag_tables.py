"""The shapes of embedding tables, checked once for as long as the tables stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fusedoptim._torch_private import TensorGuards
from fusedoptim.launch.block import Indices
from fusedoptim.ops._bag_checks import check_weights
from fusedoptim.step.unchanged import tensor_guards

_MOST_KEPT = 256
_known: dict[Any, tuple[TensorGuards, Tables]] = {}
"""By the address of the first table and their number, with a check that all is as it was."""


class Tables(NamedTuple):
    """What is the same in each call for some tables."""

    widths: Indices
    rows: Indices
    are_contiguous: bool


def tables_of(weights: Sequence[Tensor]) -> Tables:
    """The shapes of tables; raise if the operators do not take them.

    To look at each of some tens of tables takes as long as a small batch's kernels do.
    """
    key = weights[0].data_ptr() if weights else 0, len(weights)
    found = _known.get(key)
    if found is not None and found[0].check(*weights):
        return found[1]
    check_weights(weights)
    shapes = np.array([weight.shape for weight in weights], np.int64)
    are_contiguous = all(weight.is_contiguous() for weight in weights)
    tables = Tables(shapes[:, 1], shapes[:, 0], are_contiguous)
    if len(_known) >= _MOST_KEPT:
        _known.clear()
    _known[key] = tensor_guards(weights), tables
    return tables
