"""What a step updates, dense or sparse, and in which order."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Protocol

from torch import Tensor

from fusedoptim.step.scalars import Settings
from fusedoptim.step.tensors import State


class Rows(Protocol):
    """Parameters that are updated together: dense ones, or one with a sparse gradient."""

    copies: bool
    """Whether an update works on copies of parameters, made when it begins."""
    fresh: Sequence[bool] | None
    """For each parameter, whether its state counts as just made; None if it must be looked up."""

    def refresh(self) -> bool:
        """Take this step's gradients; False if any tensor is not what it was when checked."""

    def sum_of_squares(self) -> Tensor:
        """The squares of all gradients' elements, summed: a 0-d tensor."""

    def submit(self, settings: Settings, common: Tensor | None) -> None:
        """Start the update.

        Args:
            settings: of the group; the same object as long as they are the same.
            common: the factor of all the optimizer's gradients; None is 1.
        """

    def commit(self, states: MutableMapping[Tensor, State]) -> None:
        """Wait if on the host, and add what the update has made to the optimizer's ``states``.

        Nothing happens if nothing was submitted. After an interrupt it can be called again.
        """


class OrderedRows(Protocol):
    """The updates of one group, in order."""

    @property
    def settings(self) -> Settings:
        """The group's numbers."""

    @property
    def together(self) -> Sequence[Rows]:
        """Those that start without waiting for each other."""

    @property
    def in_turn(self) -> Sequence[Callable[[], Rows]]:
        """Each gives the rows of an update that starts when all before it are committed."""
