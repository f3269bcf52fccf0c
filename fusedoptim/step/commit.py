"""A step as a transaction: every launch happens once or not at all, whatever interrupts it.

A KeyboardInterrupt, or an exception from a signal handler, may be raised between any two Python
instructions. This module is the only one of the optimizers that takes account of it:

- A launch counts as made when its event is in a list, to which the C call that submits the kernel
  appends it. Python raises interrupts before that call or after it, never inside.
- What was submitted is committed, that is, waited for and added to the optimizer's state, even if
  an interrupt arrives meanwhile. Every commit may be repeated.
- What an interrupt has kept from being submitted, of an update of several kernels, is submitted
  before its commit.

docs/design/sections-and-interrupts.md has the whole argument.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor

from fusedoptim.launch.pipeline import Stage
from fusedoptim.step.rows import OrderedRows, Rows
from fusedoptim.step.tensors import State


class Submission:
    """The launches of one update."""

    def __init__(self, waits: bool) -> None:
        """``waits`` says whether a commit must wait until the kernels have ended."""
        self._waits = waits
        self._stages: Sequence[Stage] = ()
        self.events: list[Any] | None = None
        """Of the stages submitted so far; None before an update and once it is committed."""

    def submit(self, stages: Sequence[Stage]) -> None:
        """Submit the stages in order."""
        self._stages = stages
        events: list[Any] = []
        self.events = events
        for stage in stages:
            stage.launch(events)

    def complete(self) -> bool:
        """Submit what is missing, and wait; False if the update has not begun."""
        events, stages = self.events, self._stages
        if events is None or (stages and not events):
            return False
        for stage in stages[len(events) :]:
            stage.launch(events)
        if self._waits:
            for stage in stages:
                if stage.pending:
                    stage.wait()
        return True


def run(
    plans: Sequence[OrderedRows], common: Tensor | None, states: MutableMapping[Tensor, State]
) -> None:
    """Update all groups.

    Args:
        plans: of the groups.
        common: the factor of all the optimizer's gradients; None is 1.
        states: the optimizer's.
    """
    submitted: list[Rows] = []  # each is in it from just before it starts
    try:
        try:
            for plan in plans:
                for rows in plan.together:
                    submitted.append(rows)
                    rows.submit(plan.settings, common)
                for next_rows in plan.in_turn:
                    _commit_all(submitted, states)  # what follows is made from what these updated
                    rows = next_rows()
                    submitted.append(rows)
                    rows.submit(plan.settings, common)
                    _commit_all(submitted, states)
        finally:
            _commit_all(submitted, states)
    except BaseException:
        _commit_all(submitted, states)  # an interrupt may have kept it from some of them
        raise


def _commit_all(submitted: Sequence[Rows], states: MutableMapping[Tensor, State]) -> None:
    """Commit everything, whatever happens to one of them."""
    error: BaseException | None = None
    for rows in submitted:
        try:
            rows.commit(states)
        except BaseException as raised:
            error = error or raised
    if error is not None:
        raise error
