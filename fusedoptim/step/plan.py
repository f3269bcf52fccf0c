"""Which parameters an optimizer updates, by which launches, in which order.

A plan is made at one step and used for as long as it fits: the optimizer holds the same groups,
parameters and state, and the tensors are unchanged.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedoptim.kernels.language import Role
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.launch.modules import load_module
from fusedoptim.step.checks import (
    OPTIONS,
    check_candidate,
    check_half,
    check_not_averaged,
    checked_numbers,
    describe,
    named_params,
)
from fusedoptim.step.commit import Plan
from fusedoptim.step.dense import DenseRows
from fusedoptim.step.joint import JointUpdate, LateUpdates
from fusedoptim.step.modes import on_memory
from fusedoptim.step.rows import Rows, Update
from fusedoptim.step.rule import Candidate, UpdateRule
from fusedoptim.step.scalars import Settings
from fusedoptim.step.sharding import (
    MeshSum,
    ShardedGradients,
    Spread,
    dtensors,
    has_dtensors,
    is_divided,
    is_piece,
    local_of,
    mesh_sums,
    spread_of,
)
from fusedoptim.step.sparse import SparseRows, can_update_rows
from fusedoptim.step.state import variant_of
from fusedoptim.step.tensors import PARAM_DTYPES, Group, State, update_order
from fusedoptim.step.unchanged import are_same_objects

_refresh = operator.methodcaller("refresh")
_call = operator.methodcaller("__call__")

PIECES = (
    "needs norms of whole parameters, but FullyShardedDataParallel does not expose the parts on "
    "other processes; shard the model by fully_shard() (FSDP2), or clip gradients by the "
    "model's own clip_grad_norm_()"
)
_END = object()
"""Marks the end of the objects that a plan compares, so that a different number is noticed too."""
_UNCHANGING = (float, int, str, type(None))  # bool is an int


class _Alike(NamedTuple):
    """What the parameters of one launch have in common."""

    order: int
    """How many updates of other parameters that share their memory come first (update_order)."""
    is_repeated: bool
    """Whether the parameter was given before, in this group or another."""
    is_known: bool
    """Whether an earlier group has it."""
    sparse_number: int
    """Unique for each parameter with a sparse gradient, which is updated alone; -1 if dense."""
    device: torch.device
    dtype: torch.dtype
    is_split: bool
    spread: Spread | None
    kernels: tuple[str, ...]


class GroupPlan:
    """The updates of one group."""

    settings: Settings
    """The group's numbers; a new object if they may differ from the last step's."""
    is_final: bool
    """Whether the plan fits for as long as the group and the state hold the same objects."""

    @on_memory
    def __init__(
        self,
        rule: UpdateRule,
        groups: Sequence[Group],
        in_earlier_groups: set[int],
        first_number: int,
    ) -> None:
        """Check all parameters that have a gradient, and lay out their updates.

        Args:
            rule: the group's rule.
            groups: the optimizer's groups.
            in_earlier_groups: ids of the group's parameters that an earlier group has too.
            first_number: how many parameters earlier groups have, with which rows are numbered.
        """
        rule.check_options()
        self._rule = rule
        self._first_number = first_number
        self._implementation = _implementation(rule)
        self._params = list(rule.group["params"])
        found = _candidates(rule, groups)
        with_gradient = {id(candidate.param) for candidate in found}
        self.idle = [p for p in self._params if id(p) not in with_gradient]
        """Parameters without a gradient."""
        candidates = [_checked(rule, candidate) for candidate in found]
        if any(rule.is_split(candidate.param) for candidate in found):
            check_not_averaged(rule.optimizer_name)
        self.rows: list[Rows] = []
        """The rows that can be updated in any order."""
        self._deferred: list[tuple[Rows, Callable[[], Rows]]] = []
        """The parameters that share memory with others updated before them, in order: their present
        rows, and a function that makes the rows from their later state."""
        self._without_repeated: list[Rows] = []
        self._lay_out(candidates, in_earlier_groups)
        self._arrange()
        self._has_pieces = any(map(is_piece, self._params))
        self.sums = {p: _sums_over(rule, p) for p in dtensors(self._params)}
        """For each sharded parameter, how many values are summed over it for its update."""
        dtypes = {candidate.param.dtype for candidate in candidates}
        self._largest = min((PARAM_DTYPES[dtype].largest for dtype in dtypes), default=math.inf)
        self._serves_once = bool(self._deferred)
        self.keeps_gradients = self._serves_once or any(
            isinstance(rows, SparseRows) for rows in self.rows
        )
        """Whether gradients are kept until :meth:`release`, also by rows that are committed."""
        self._read_numbers()

    def _lay_out(self, candidates: list[Candidate], in_earlier_groups: set[int]) -> None:
        rule = self._rule
        members = _alike(rule, candidates, in_earlier_groups)
        for alike in sorted(members, key=operator.attrgetter("order")):
            rows = _rows(rule, members[alike], alike.kernels)
            if alike.order == 0 and not alike.is_repeated:
                self.rows.append(rows)
            else:
                # torch looks at the state of a whole group before it updates any of it.
                fresh = None if alike.is_known else rows.fresh
                make = functools.partial(_rows, rule, members[alike], alike.kernels, fresh)
                self._deferred.append((rows, make))
            if not alike.is_repeated:
                self._without_repeated.append(rows)

    def _arrange(self) -> None:
        """Sort the rows by when they can be submitted."""
        self.joint: list[DenseRows] = [
            rows for rows in self.rows if isinstance(rows, DenseRows) and rows.is_joint
        ]
        """The rows whose update needs norms of sharded parameters."""
        not_joint = [rows for rows in self.rows if rows not in self.joint]
        self.direct: list[Rows] = [rows for rows in not_joint if not rows.copies]
        """The rows that can be submitted together with any others."""
        self.late: list[tuple[Update, Callable[[], Rows] | None]] = [
            *((rows, functools.partial(_itself, rows)) for rows in not_joint if rows.copies),
            *self._deferred,
        ]
        """The other updates, in order, as in ``updates``."""
        self.updates: list[tuple[Update, Callable[[], Rows] | None]] = [
            *((rows, None) for rows in self.direct),
            *self.late,
        ]
        """See :attr:`fusedoptim.step.commit.Plan.updates`."""

    def fits(self, rule: UpdateRule, first_number: int) -> bool:
        """Read the group's numbers; False if the plan does not fit the group any more."""
        if self._serves_once or _implementation(rule) != self._implementation:
            return False
        if first_number != self._first_number:
            return False
        if not are_same_objects(rule.group["params"], self._params):
            return False
        self._rule = rule
        self._read_numbers()
        return True

    def refresh(self) -> bool:
        """Take this step's gradients; False if the plan does not fit them."""
        return _are_idle(self.idle) and all(map(_refresh, self.rows))

    def release(self) -> None:
        """Keep no gradient alive once a step has ended."""
        for rows in self.rows:
            rows.release()
        if self._serves_once:
            self.rows, self._deferred, self._without_repeated = [], [], []
            self._arrange()

    def sums_of_squares(self) -> list[tuple[Spread | None, Tensor]]:
        """The squares of the elements of all gradients, each summed once, and their spread."""
        if self._has_pieces:
            raise RuntimeError(f"{self._rule.optimizer_name}: max_grad_norm {PIECES}")
        return [(rows.spread, rows.sum_of_squares()) for rows in self._without_repeated]

    def _read_numbers(self) -> None:
        rule, group = self._rule, self._rule.group
        numbers = checked_numbers(rule, self._largest)
        self.settings = Settings(numbers, -1.0 if group.get("maximize") else 1.0)
        hyper_parameters = [group[name] for name in group if name not in ("params", "param_names")]
        self.is_final = (
            not self._serves_once
            and not rule.depends_on_optimizer
            and all(map(_is_unchanging, hyper_parameters))
        )


class StepPlan:
    """The plans of all groups."""

    def __init__(self) -> None:
        """Begin without plans."""
        self.groups: list[GroupPlan] = []
        self.all: Sequence[Plan] = []
        """The plans of all updates: of the groups, and of what groups have in common."""
        self.mesh_sums: list[MeshSum] = []
        """Sums over the sharded parameters, for norms of all gradients."""
        self.joint: JointUpdate | None = None
        """The update that needs norms of sharded parameters."""
        self._sharded: ShardedGradients | None = None
        """See :attr:`fusedoptim.step.rule.UpdateRule.sharded`."""
        self.state_seen: list[object] | None = None
        """The keys and dicts of the state after the first step of these plans; a load or a reset
        makes new ones."""
        self._seen: list[object] = []
        """The state's and the groups' contents when the plans last fitted; empty if a value among
        them may change in place."""
        self.keeping: list[GroupPlan] = []
        """The plans that keep gradients until they are told to release them."""
        self._joined: list[GroupPlan] = []
        """The plans for which ``all`` was made."""
        self._refreshes: list[Callable[[], bool]] = []
        """The groups' refreshes while ``_seen`` is not empty; each must return true."""

    def update(
        self,
        state: Mapping[Tensor, State],
        groups: Sequence[Group],
        rule_of: Callable[[Group], UpdateRule],
    ) -> None:
        """Make the plans fit the optimizer's present contents; no tensor of the user's is written.

        Args:
            state: the optimizer's state.
            groups: the optimizer's groups.
            rule_of: gives the rule of a group.
        """
        parts: list[Iterable[object]] = [state, state.values()]
        for group in groups:
            parts += group.values(), group["params"]
        # In one pass that keeps no object: each further pass over thousands of tensors would read
        # them from memory again.
        seen = self._seen
        is_same = bool(seen) and all(
            map(operator.is_, chain(chain.from_iterable(parts), (_END,)), seen)
        )
        if not is_same:
            seen = [*chain.from_iterable(parts), _END]
            self._find_sharded(groups if has_dtensors(seen) else [])
        try:
            if self._sharded is not None:
                self._sharded.read()
            if is_same and all(map(_call, self._refreshes)):
                return
            self._seen, self._refreshes = [], []
            # swap_tensors keeps the objects
            if is_same and self._find_sharded(groups) and self._sharded is not None:
                self._sharded.read()
            all_fit = self._revise(state, groups, rule_of)
        finally:
            if self._sharded is not None:
                self._sharded.forget()
        self.keeping = [plan for plan in self.groups if plan.keeps_gradients]
        if not (all_fit and are_same_objects(self.groups, self._joined)):
            self._join()
        if all_fit and all(plan.is_final for plan in self.groups):
            idle = [functools.partial(_are_idle, plan.idle) for plan in self.groups if plan.idle]
            self._refreshes = [*idle, *(rows.refresh for plan in self.groups for rows in plan.rows)]
            self._seen = seen

    def _find_sharded(self, groups: Sequence[Group]) -> bool:
        """Find the DTensors of groups; return whether they or their placements have changed."""
        params = dtensors(p for group in groups for p in group["params"])
        known = self._sharded
        if are_same_objects(params, known.params if known else ()) and not (
            known and known.are_moved()
        ):
            return False
        self._sharded = ShardedGradients(params) if params else None
        self.groups = []  # their plans read the gradients of the others
        return True

    def release(self) -> None:
        """Keep no gradient alive after a step that was not taken."""
        for plan in self.groups:
            plan.release()

    def see_state(self, state: Mapping[Tensor, State]) -> None:
        """Note the state that a step has made."""
        self.state_seen = [*state, *state.values()]

    def _revise(
        self,
        state: Mapping[Tensor, State],
        groups: Sequence[Group],
        rule_of: Callable[[Group], UpdateRule],
    ) -> bool:
        """Replace the plans that do not fit; False if there were any, as new ones make state."""
        if not are_same_objects([*state, *state.values()], self.state_seen or ()):
            self.groups, self.state_seen = [], None
        all_fit = True
        in_earlier_groups: list[set[int]] = []
        first_number = 0
        for i, group in enumerate(groups):
            plan = self.groups[i] if i < len(self.groups) else None
            rule = rule_of(group)
            rule.sharded = self._sharded
            if plan is None or not (plan.fits(rule, first_number) and plan.refresh()):
                all_fit = False
                self.state_seen = None  # the step will make state
                in_earlier_groups = in_earlier_groups or _in_earlier_groups(groups)
                self.groups[i : i + 1] = [
                    GroupPlan(rule, groups, in_earlier_groups[i], first_number)
                ]
                if any(in_earlier_groups):  # perhaps because this group has changed
                    del self.groups[i + 1 :]
            first_number += len(group["params"])
        del self.groups[len(groups) :]
        return all_fit

    def _join(self) -> None:
        """Lay out what groups have in common; the same on all processes."""
        self.all, self.mesh_sums, self.joint = self.groups, [], None
        if self._sharded is not None:
            params = self._sharded.params
            self.mesh_sums = mesh_sums(params, list(map(_arithmetic, params)))
            sums = {p: width for plan in self.groups for p, width in plan.sums.items() if width}
            over_norms = mesh_sums(list(sums), list(map(_arithmetic, sums)))
            if over_norms:
                self.joint = JointUpdate(self.groups, over_norms, max(sums.values()))
                self.all = [self.joint, *map(LateUpdates, self.groups)]
        self._joined = self.groups.copy()


def _in_earlier_groups(groups: Sequence[Group]) -> list[set[int]]:
    """For each group, the ids of its parameters that an earlier group has too.

    torch refuses to make such groups, but users may edit groups.
    """
    met: set[int] = set()
    repeated = []
    for group in groups:
        params = set(map(id, group["params"]))
        repeated.append(params & met)
        met |= params
    return repeated


def _are_idle(params: Sequence[Tensor]) -> bool:
    """Whether none of the parameters has a gradient."""
    return all(p.grad is None for p in params)


def _itself(rows: Rows) -> Rows:
    return rows


def _alike(
    rule: UpdateRule, candidates: Sequence[Candidate], in_earlier_groups: set[int]
) -> dict[_Alike, list[Candidate]]:
    """The candidates, sorted into those that one launch can update.

    Raises:
        RuntimeError: a sharded parameter cannot be updated.
    """
    members: dict[_Alike, list[Candidate]] = {}
    met = set(in_earlier_groups)
    shards = [local_of(candidate.param) for candidate in candidates]
    for candidate, shard, order in zip(candidates, shards, update_order(shards)):
        p = candidate.param
        spread, is_repeated = spread_of(p), id(p) in met
        _check_sharded(rule, candidate, spread, is_shared=order > 0 or is_repeated)
        alike = _Alike(
            order,
            is_repeated,
            id(p) in in_earlier_groups,
            -1 if candidate.grad.layout is torch.strided else len(met),
            p.device,
            p.dtype,
            rule.is_split(p),
            spread,
            _kernels(rule, p, shard, spread),
        )
        members.setdefault(alike, []).append(candidate)
        met.add(id(p))
    return members


def _check_sharded(
    rule: UpdateRule, candidate: Candidate, spread: Spread | None, is_shared: bool
) -> None:
    p = candidate.param
    if is_piece(p) and _sums_over(rule, p):
        raise RuntimeError(f"{describe(rule.optimizer_name, candidate)} {PIECES}")
    if is_shared and spread is not None:
        raise RuntimeError(
            f"{describe(rule.optimizer_name, candidate)} is sharded (DTensor), and shares "
            "memory with another parameter, or is given twice; clone() one of them"
        )


def _kernels(
    rule: UpdateRule, param: Tensor, shard: Tensor, spread: Spread | None
) -> tuple[str, ...]:
    """The kernels that update a parameter, of which this process has ``shard``."""
    if is_divided(spread):
        return rule.sharded_kernels()
    numel = shard.numel() * PARAM_DTYPES[param.dtype].components
    return rule.kernels(numel <= BACKENDS[param.device.type].shape.chunk)


def _rows(
    rule: UpdateRule,
    candidates: Sequence[Candidate],
    kernels: tuple[str, ...],
    fresh: Sequence[bool] | None = None,
) -> Rows:
    """The rows of parameters that one launch can update, if their memory allows it."""
    if candidates[0].grad.layout is torch.strided:
        return DenseRows(rule, candidates, kernels, fresh)
    (candidate,) = candidates
    return SparseRows(rule, candidate)


def _candidates(rule: UpdateRule, groups: Sequence[Group]) -> list[Candidate]:
    """The group's parameters that have a gradient."""
    # The gradient is read once: another thread's zero_grad() may take it away.
    own = operator.attrgetter("grad") if rule.sharded is None else rule.sharded.of
    found = [(p, own(p), name) for p, name in named_params(groups, rule.group)]
    return [Candidate(p, grad, name) for p, grad, name in found if grad is not None]


def _checked(rule: UpdateRule, candidate: Candidate) -> Candidate:
    """The candidate, with its gradient made dense if its state is dense.

    Raises:
        TypeError, RuntimeError, ValueError: it cannot be updated.
    """
    check_candidate(rule.optimizer_name, candidate)
    if rule.is_split(candidate.param):
        check_half(rule.optimizer_name, candidate)
    if candidate.grad.layout is not torch.strided:
        rule.check_sparse(candidate)
        if not can_update_rows(rule, candidate):
            return candidate._replace(grad=candidate.grad.to_dense())
    return candidate


def _arithmetic(param: Tensor) -> torch.dtype:
    known = PARAM_DTYPES.get(param.dtype)
    return torch.float32 if known is None else known.arithmetic


def _sums_over(rule: UpdateRule, param: Tensor) -> int:
    """How many values an update of ``param`` sums over the whole of it; 0 if it needs none."""
    if param.dtype not in PARAM_DTYPES:  # it has no gradient, or it was refused
        return 0
    names = rule.sharded_kernels()
    modules = [load_module(name, variant_of(rule, param)) for name in names]
    uses = any(role is Role.CHUNK_SUMS for module in modules for _, role in module.arguments)
    return max(module.sums for module in modules) if uses else 0


def _implementation(rule: UpdateRule) -> tuple[Any, ...]:
    """The options and kernels from which a plan is made."""
    options = map(rule.group.get, OPTIONS)
    return (*options, *rule.kernels(one_row=True), *rule.kernels(one_row=False))


def _is_unchanging(value: object) -> bool:
    """Whether a hyper-parameter's value is fixed as long as the object is; a tensor's is not."""
    if isinstance(value, tuple):
        return all(map(_is_unchanging, value))
    return isinstance(value, _UNCHANGING)
