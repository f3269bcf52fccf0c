"""A step as a transaction: every launch happens once or not at all, even if it is interrupted.

A KeyboardInterrupt, or an exception from a signal handler, may be raised between any two Python
instructions, and a second one while the first is handled. This module decides what happens to a
step in that case. The modules that it calls note a change only when it is complete:

- A launch counts as made when its event is in a list, to which the C call that submits the kernel
  appends it. Python raises interrupts before that call or after it, never inside.
- What was submitted is committed, that is, waited for and added to the optimizer's state, even if
  an interrupt arrives meanwhile. Every commit may be repeated.
- If an interrupt comes between the kernels of one update, the rest of them are submitted before the
  update is committed.

docs/design/reentrancy-and-interrupts.md has the whole argument.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from fusedoptim._torch_private import increment_version
from fusedoptim.launch.pipeline import Stage
from fusedoptim.step.rows import Rows, Update
from fusedoptim.step.scalars import Settings
from fusedoptim.step.tensors import State

_Begun: TypeAlias = "tuple[Update, Sequence[Stage], list[Any]]"
"""An update, its stages, and the events of the stages that were submitted so far."""


class Plan(Protocol):
    """Updates with the same settings."""

    @property
    def settings(self) -> Settings:
        """The group's numbers."""

    @property
    def updates(self) -> Sequence[tuple[Update, Callable[[], Rows] | None]]:
        """The updates, in order; a function makes new rows once those before are committed."""


def run(
    plans: Sequence[Plan], common: Tensor | None, states: MutableMapping[Tensor, State]
) -> None:
    """Update all groups.

    Args:
        plans: the plans of all updates, in order.
        common: the factor of all the optimizer's gradients; None is 1.
        states: the optimizer's states.
    """
    begun: list[_Begun] = []
    try:
        try:
            for plan in plans:
                for rows, deferred in plan.updates:
                    if deferred is not None:
                        _commit_all(begun, states)  # it is made from what these have updated
                        rows = deferred()
                    stages = rows.prepare(plan.settings, common)
                    events: list[Any] = []
                    begun.append((rows, stages, events))
                    for stage in stages:
                        stage.launch(events)
                    increment_version(rows.written)  # on a GPU the kernels run meanwhile
                    if deferred is not None:
                        _commit_all(begun, states)
        finally:
            _commit_all(begun, states)
    except BaseException:
        _commit_all(begun, states)  # an interrupt may have kept it from some of them
        raise


def _commit_all(begun: list[_Begun], states: MutableMapping[Tensor, State]) -> None:
    """Commit all updates, even if one of them fails, and remove them from ``begun``."""
    error: BaseException | None = None
    for update in begun.copy():
        rows, stages, events = update
        try:
            if events or not stages:  # else an interrupt came before the first launch
                for stage in stages[len(events) :]:
                    stage.launch(events)
                if rows.runs_on_host:
                    for stage in stages:
                        if stage.pending:
                            stage.wait()
                rows.commit(states)
            begun.remove(update)
        except BaseException as raised:
            error = error or raised
    if error is not None:
        raise error
