"""Updates that need norms of sharded parameters: those of all groups, around one reduction.

First the kernels that sum run, then the processes of each mesh add up the sums, then the kernels
that use them run. A process that skipped a collective, or started one twice, would leave the others
waiting. Therefore all groups' updates are a single one for :mod:`fusedoptim.step.commit`, which
submits the rest of an update that has begun, and a collective is never started twice.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedoptim.launch.pipeline import Stage
from fusedoptim.step.dense import DenseRows
from fusedoptim.step.rows import Update
from fusedoptim.step.scalars import Settings
from fusedoptim.step.sharding import MeshSum
from fusedoptim.step.tensors import State


class _Plan(Protocol):
    settings: Settings


class JointUpdate:
    """The rows of all groups whose update needs norms of sharded parameters."""

    settings = Settings({}, 1.0)
    """Empty settings: each part has its group's."""

    def __init__(
        self, parts: Sequence[tuple[_Plan, DenseRows]], sums: Sequence[MeshSum], width: int
    ) -> None:
        """Join the rows of several plans.

        Args:
            parts: the plans, and their rows.
            sums: the sums over all parameters that may need norms, whether or not they have a
                gradient. They are the same on all processes.
            width: the number of values summed for each parameter.
        """
        self._parts = parts
        self.written = [tensor for _, rows in parts for tensor in rows.written]
        self.runs_on_host = any(rows.runs_on_host for _, rows in parts)
        self._reductions = [
            _Reduction(each, [rows for _, rows in parts if each.includes(rows.spread)], width)
            for each in sums
        ]
        self.updates: list[tuple[Update, None]] = [(self, None)]
        """See :class:`fusedoptim.step.plan.GroupPlan`."""

    def prepare(self, settings: Settings, common: Tensor | None) -> Sequence[Stage]:
        """See :class:`fusedoptim.step.rows.Update`."""
        summing: list[Stage] = []
        using: list[Stage] = []
        for plan, rows in self._parts:
            stages = rows.prepare(plan.settings, common)
            summing += stages[: rows.pipeline.summing]
            using += stages[rows.pipeline.summing :]
        for reduction in self._reductions:
            reduction.begin()
        return [*summing, *self._reductions, *using]

    def commit(self, states: MutableMapping[Tensor, State]) -> None:
        """See :class:`fusedoptim.step.rows.Update`."""
        for _, rows in self._parts:
            rows.commit(states)


class _Reduction:
    """Adds up what the processes of one mesh have summed over their shards."""

    pending: Sequence[Any] = ()
    """See :class:`fusedoptim.launch.pipeline.Stage`."""

    def __init__(self, over_mesh: MeshSum, parts: Sequence[DenseRows], width: int) -> None:
        self._sum = over_mesh
        place = {p: i for i, p in enumerate(over_mesh.params)}
        device = over_mesh.device
        self._parts = [
            (rows.pipeline, torch.tensor([place[p] for p in rows.params], device=device))
            for rows in parts
        ]
        self._own = [
            part for part, rows in zip(self._parts, parts) if over_mesh.contributes(_spread(rows))
        ]
        # A row for each parameter, and one that compares the parameters of all processes.
        self._values = torch.zeros(len(place) + 1, width, dtype=over_mesh.dtype, device=device)
        self._fingerprint = self._values[-1, 0]
        self._works: list[Any] = []

    def begin(self) -> None:
        """Forget the last step's collective."""
        self._works = []

    def launch(self, events: list[Any]) -> None:
        """Add up the sums, where the kernels that follow read them."""
        if not self._works:  # else an interrupt came after the collective was started
            self._values.zero_()
            self._fingerprint.fill_(self._sum.fingerprint)
            for pipeline, places in self._own:
                sums = pipeline.sums_by_tensor()
                self._values.index_copy_(0, places, sums.to(self._values))
        self._sum.add_up(self._values, self._works)
        self._sum.check_same(self._fingerprint)
        for pipeline, places in self._parts:
            pipeline.totals.copy_(self._values[places])
        # Events count the stages. A block that waits for the last event waits for the last kernel.
        events.append(events[-1] if events else None)

    def wait(self) -> None:
        """Nothing is pending."""


def _spread(rows: DenseRows) -> Any:
    return rows.spread
