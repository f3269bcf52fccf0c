"""What a step updates, dense or sparse."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Protocol

from torch import Tensor

from fusedoptim.launch.pipeline import Stage
from fusedoptim.step.scalars import Settings
from fusedoptim.step.sharding import Spread
from fusedoptim.step.tensors import State


class Update(Protocol):
    """A part of a step that is submitted and committed as a whole."""

    written: list[Tensor]
    """The parameters, and the local shards of sharded ones, whose writes no launch counts."""
    runs_on_host: bool
    """Whether a commit must wait until the kernels have ended."""

    def prepare(self, settings: Settings, common: Tensor | None) -> Sequence[Stage]:
        """Write the step's numbers, and return what is to be submitted, in order.

        Args:
            settings: the group's; the same object as long as their values are the same.
            common: the factor of all the optimizer's gradients; None is 1.
        """

    def commit(self, states: MutableMapping[Tensor, State]) -> None:
        """Add what the update has made to the optimizer's ``states``; may be repeated."""


class Rows(Update, Protocol):
    """Parameters that are updated together: dense ones, or one with a sparse gradient."""

    spread: Spread | None
    """How the parameters are spread over processes; all of them alike."""
    copies: bool
    """Whether an update works on copies of parameters, made when it begins."""
    fresh: Sequence[bool] | None
    """For each parameter, whether its state counts as just made; None if it must be looked up."""

    def refresh(self) -> bool:
        """Take this step's gradients; False if any tensor has changed since it was checked."""

    def release(self) -> None:
        """Keep no gradient alive; nothing is launched before the next :meth:`refresh`."""

    def sum_of_squares(self) -> Tensor:
        """The squares of all gradients' elements, summed: a 0-d tensor."""
