"""The step counts of a bucket's parameters, held in one tensor.

torch.optim keeps ``state["step"]`` as a 0-d tensor for each parameter. Counting up 10,000 of
them, one by one or through a list, takes 4 ms; as views of one tensor they are counted up, and
read, in one operation.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim.step.tensors import State

KEY = "step"
Steps = np.ndarray[Any, np.dtype[np.float64]] | np.float64
"""Counts of several parameters, or one for all: arithmetic of arrays of one takes 5 us more."""

_COUNT = operator.itemgetter(KEY)


class StepCounts:
    """How many steps each of some parameters has taken."""

    def __init__(self, states: Sequence[State]) -> None:
        """Copy the counts out of ``states``; a parameter without one has taken no step."""
        counts = [float(state.get(KEY, 0.0)) for state in states]
        self._packed = torch.tensor(counts, dtype=torch.float32, device="cpu")
        self.views: list[Tensor] = list(self._packed.unbind()) if counts else []
        """Each parameter's count, a 0-d float32 tensor on the CPU."""
        self._addresses: list[int] = []

    def are_held_by(self, states: Sequence[State]) -> bool:
        """Whether each state's count still is in the memory that is counted up here."""
        try:
            addresses = list(map(Tensor.data_ptr, map(_COUNT, states)))
        except (KeyError, TypeError):  # it is gone, or a number
            return False
        start, size = self._packed.data_ptr(), self._packed.element_size()
        if self._addresses[:1] != [start]:  # not yet known, or share_memory_() has moved them
            self._addresses = list(range(start, start + len(self.views) * size, size))
        return addresses == self._addresses

    def next(self) -> Steps:
        """The counts after the coming step; one for all, where they are equal."""
        # The memory anew: share_memory_() of a view moves that of all.
        self._next = counts = self._packed.numpy() + 1
        if len(counts) == 1 or (counts == counts[0]).all():
            return np.float64(counts[0])
        return counts.astype(np.float64)

    def count_up(self) -> None:
        """Count the step that :meth:`next` was asked of; once, however often this is called."""
        self._packed.numpy()[...] = self._next
