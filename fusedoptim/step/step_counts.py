"""The step counts of parameters that are updated together, held in one tensor.

torch.optim keeps ``state["step"]`` as a 0-d tensor for each parameter. Here they are views of one
tensor, so one operation reads any number of them, and one counts them up.
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
Steps = np.ndarray[Any, np.dtype[np.float64]] | float
"""Counts of several parameters, or one float for all, with which arithmetic is quicker."""

MOST_STEPS = 2**24
"""float32 holds all counts up to this one; adding 1 to it changes nothing."""

_COUNT = operator.itemgetter(KEY)


class StepCounts:
    """How many steps each of some parameters has taken."""

    def __init__(self, states: Sequence[State]) -> None:
        """Copy the counts out of ``states``; a parameter without one has taken no step."""
        counts = [float(state.get(KEY, 0.0)) for state in states]
        self._packed = torch.tensor(counts, dtype=torch.float32, device="cpu")
        self.views: list[Tensor] = list(self._packed.unbind()) if counts else []
        """Each parameter's count, a 0-d float32 tensor on the CPU."""
        self._find_memory()

    def _find_memory(self) -> None:
        """Note where the counts are: share_memory_() of one view moves all of them."""
        self._array = self._packed.numpy()
        self._numbers: Any = self._array.data
        """The same counts: quicker than an array to read or write a single one."""
        start, size = self._packed.data_ptr(), self._packed.element_size()
        self._addresses = list(range(start, start + len(self.views) * size, size))

    def are_held_by(self, states: Sequence[State]) -> bool:
        """Whether each state's count is still in the memory that is counted up here."""
        if self._packed.data_ptr() != self._addresses[0]:
            self._find_memory()
        try:
            return list(map(Tensor.data_ptr, map(_COUNT, states))) == self._addresses
        except (KeyError, TypeError):  # it was removed, or replaced by a number
            return False

    def check_next_differs(self, optimizer: str) -> None:
        """Raise if float32 cannot tell the coming step from the previous one.

        Args:
            optimizer: its name in errors.

        Raises:
            RuntimeError: a parameter has taken MOST_STEPS or more.
        """
        if (self._array >= MOST_STEPS).any():
            raise RuntimeError(
                f"{optimizer}: a parameter has taken {self._array.max():.0f} steps; float32 cannot "
                f"count beyond {MOST_STEPS}, and the step count selects the random words for a "
                f"reduced state_dtype; set state['step'] of all parameters to "
                f"{MOST_STEPS // 2}, where both bias corrections are 1 as well"
            )

    def next(self) -> Steps:
        """The counts after the coming step; one for all if they are equal."""
        first: float = self._numbers[0]
        if len(self._numbers) == 1 or (self._array == first).all():
            self._next: Steps = first + 1
        else:
            self._next = self._array.astype(np.float64) + 1
        return self._next

    def count_up(self) -> None:
        """Store the counts that :meth:`next` has returned; calling it again changes nothing."""
        if len(self._numbers) == 1:
            self._numbers[0] = self._next
        else:
            self._array[...] = self._next
