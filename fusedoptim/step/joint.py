"""Updates that need norms of sharded parameters: those of all groups, around one reduction.

First the kernels that sum run, then the processes of each mesh add up the sums, then the kernels
that use them run. A process that skipped a collective, or started one twice, would leave the others
waiting. Therefore all groups' updates are a single one for :mod:`fusedoptim.step.commit`, which
submits the rest of an update that has begun, and a collective is never started twice. Parameters
that need no such norms are updated after the reduction, as nothing may be written if it fails.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fusedoptim.launch.pipeline import Stage
from fusedoptim.step.dense import DenseRows
from fusedoptim.step.rows import Rows, Update
from fusedoptim.step.scalars import Settings
from fusedoptim.step.sharding import FINGERPRINT, Layout, MeshSum
from fusedoptim.step.tensors import State


class _Plan(Protocol):
    """See :class:`fusedoptim.step.plan.GroupPlan`."""

    settings: Settings
    joint: list[DenseRows]
    direct: list[Rows]
    late: list[tuple[Update, Callable[[], Rows] | None]]


class JointUpdate:
    """The rows of all groups, some of which need norms of sharded parameters."""

    settings = Settings({}, 1.0)
    """Empty settings: each part has its group's."""

    def __init__(self, plans: Sequence[_Plan], sums: Sequence[MeshSum], width: int) -> None:
        """Join the rows of several plans, except for their :class:`LateUpdates`.

        Args:
            plans: the plans of groups.
            sums: the sums over all parameters that may need norms, whether or not they have a
                gradient. They are the same on all processes.
            width: the number of values summed for each parameter.
        """
        self._parts = parts = [(plan, rows) for plan in plans for rows in plan.joint]
        self._others = others = [(plan, rows) for plan in plans for rows in plan.direct]
        self._rows: list[Rows] = [rows for _, rows in (*parts, *others)]
        self.written = [tensor for rows in self._rows for tensor in rows.written]
        self.runs_on_host = any(rows.runs_on_host for rows in self._rows)
        self._reductions = [
            _Reduction(each, [rows for _, rows in parts if each.includes(rows.spread)], width)
            for each in sums
        ]
        self._sums = sums
        self._layouts = {
            each.mesh: reduction.layout for each, reduction in zip(sums, self._reductions)
        }
        self.updates: list[tuple[Update, None]] = [(self, None)]
        """See :class:`fusedoptim.step.plan.GroupPlan`."""

    def agree(self, agreed: dict[Any, Layout]) -> None:
        """Raise unless the processes' next collectives have one layout; nothing is written.

        One process alone may find that its parameters have changed. The others then add up what
        they agreed on, and it does so too, with a signature that differs from theirs.

        Args:
            agreed: the layout on each mesh on which the processes agreed last.
        """
        if agreed != self._layouts:
            for each in self._sums:
                each.agree(agreed.get(each.mesh))
            agreed.clear()
            agreed.update(self._layouts)

    def prepare(self, settings: Settings, common: Tensor | None) -> Sequence[Stage]:
        """See :class:`fusedoptim.step.rows.Update`."""
        summing: list[Stage] = []
        using: list[Stage] = []
        for plan, rows in self._parts:
            stages = rows.prepare(plan.settings, common)
            summing += stages[: rows.pipeline.summing]
            using += stages[rows.pipeline.summing :]
        for plan, others in self._others:
            using += others.prepare(plan.settings, common)
        for reduction in self._reductions:
            reduction.begin()
        return [*summing, *self._reductions, *using]

    def commit(self, states: MutableMapping[Tensor, State]) -> None:
        """See :class:`fusedoptim.step.rows.Update`."""
        for rows in self._rows:
            rows.commit(states)


class LateUpdates:
    """What a group updates after a :class:`JointUpdate`."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self.updates = plan.late

    @property
    def settings(self) -> Settings:
        """The group's numbers."""
        return self._plan.settings


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
            part for part, rows in zip(self._parts, parts) if over_mesh.contributes(rows.spread)
        ]
        numel = len(place) * width
        self._added_up = torch.zeros(numel + FINGERPRINT, dtype=over_mesh.dtype, device=device)
        self._values = self._added_up[:numel].view(len(place), width)
        self.layout: Layout = len(self._added_up), self._added_up.dtype
        self._works: list[Any] = []

    def begin(self) -> None:
        """Forget the last step's collective."""
        self._works = []

    def launch(self, events: list[Any]) -> None:
        """Add up the sums, where the kernels that follow read them."""
        if not self._works:  # else an interrupt came after the collective was started
            self._values.zero_()
            self._sum.sign(self._added_up)
            for pipeline, places in self._own:
                sums = pipeline.sums_by_tensor()
                self._values.index_copy_(0, places, sums.to(self._values))
        self._sum.add_up(self._added_up, self._works)
        self._sum.check_same(self._added_up)
        for pipeline, places in self._parts:
            pipeline.totals.copy_(self._values[places])
        # Events count the stages. A block that waits for the last event waits for the last kernel.
        events.append(events[-1] if events else None)

    def wait(self) -> None:
        """Nothing is pending."""
