"""How one group's parameters are updated: laid out at one step, and used while it fits."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedoptim.split.halves import check_half
from fusedoptim.step.dense import Bucket, Settings
from fusedoptim.step.sparse import SparseBucket
from fusedoptim.step.unchanged import (
    Candidate,
    Group,
    State,
    are_same_objects,
    check_candidate,
    turns,
)

if TYPE_CHECKING:
    from fusedoptim.optimizer import FusedOptimizer

Numbers = dict[str, float]

OPTIONS = ("foreach", "differentiable", "capturable", "fused")
"""By which a group says how its step is to be computed."""

_refresh = operator.methodcaller("refresh")

_UNCHANGING = (float, int, str, type(None))  # bool is an int


class _GroupRecipe(NamedTuple):
    """What a bucket of one group asks for."""

    optimizer: FusedOptimizer
    group: Group
    kernels: tuple[str, ...]

    @property
    def name(self) -> str:
        return type(self.optimizer).__name__

    def is_split(self, param: Tensor) -> bool:
        return self.optimizer.is_split(param)

    @property
    def optional_state(self) -> frozenset[str]:
        return self.optimizer._optional_state

    @property
    def sparse_state(self) -> tuple[str, ...]:
        return self.optimizer._sparse_state

    def initial_state(self, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        return self.optimizer._initial_state(self.group, name, target, dtype)


def _checked(recipe: _GroupRecipe, candidate: Candidate) -> Candidate:
    """The candidate, its gradient made dense if its state is.

    Raises:
        TypeError, RuntimeError, ValueError: it cannot be updated.
    """
    optimizer = recipe.optimizer
    check_candidate(recipe.name, candidate)
    if optimizer.is_split(candidate.param):
        check_half(recipe.name, candidate)
    if candidate.grad.layout is not torch.strided:
        optimizer._check_sparse(recipe.group, candidate)
        if not SparseBucket.takes(recipe, candidate, optimizer.state):
            return candidate._replace(grad=candidate.grad.to_dense())
    return candidate


def _bucket(
    recipe: _GroupRecipe,
    members: list[Candidate],
    fresh: Sequence[bool] | None = None,
) -> Bucket | SparseBucket:
    """What updates ``members``: a bucket for dense gradients, or one for a sparse gradient."""
    states: dict[Tensor, State] = recipe.optimizer.state
    if members[0].grad.layout is torch.strided:
        return Bucket(recipe, members, states, fresh)
    (candidate,) = members
    return SparseBucket(recipe, candidate, states)


class Later(NamedTuple):
    """Parameters of a group that share memory with some that are updated before them."""

    members: list[Candidate]
    planned: Bucket | SparseBucket
    """What would update them now."""
    is_repeated: bool
    """Whether they are those themselves."""
    fresh: Sequence[bool] | None
    """Whether the state of each counts as just made; None if it has to be looked at then."""

    def bucket(self, optimizer: FusedOptimizer, group: Group) -> Bucket | SparseBucket:
        """What updates them after those, from the state that they have then."""
        recipe = _GroupRecipe(optimizer, group, optimizer._kernels(group))
        return _bucket(recipe, self.members, self.fresh)


class Plan:
    """One group's hyper-parameters as they are, and its parameters, sorted into buckets."""

    settings: Settings
    """Another object if something may be another."""
    is_final: bool
    """Whether it fits as long as the group, and the optimizer's state, hold the same objects."""

    def __init__(self, optimizer: FusedOptimizer, group: Group, given_before: set[int]) -> None:
        """Check all parameters that have a gradient, and lay out their updates.

        Args:
            optimizer: whose state the buckets hold.
            group: of the optimizer.
            given_before: ids of its parameters that a group before it has too.
        """
        optimizer._check_options(group)
        self._implementation = _implementation(optimizer, group)
        self._params = list(group["params"])
        found = list(optimizer._candidates(group))
        with_gradient = {id(candidate.param) for candidate in found}
        self._idle = [p for p in self._params if id(p) not in with_gradient]
        recipe = _GroupRecipe(optimizer, group, optimizer._kernels(group))
        candidates = [_checked(recipe, candidate) for candidate in found]
        members: dict[Any, list[Candidate]] = {}
        met = set(given_before)
        for candidate, turn in zip(candidates, turns([c.param for c in candidates])):
            p = candidate.param
            alone = len(met) if candidate.grad.layout is not torch.strided else -1
            is_known = id(p) in given_before
            key = (turn, id(p) in met, is_known, alone, p.device, p.dtype, optimizer.is_split(p))
            members.setdefault(key, []).append(candidate)
            met.add(id(p))
        self.buckets: list[Bucket | SparseBucket] = []
        """Those that can be updated in any order."""
        self.later: list[Later] = []
        """In order of their turns."""
        for key in sorted(members, key=operator.itemgetter(0)):
            turn, is_repeated, is_known, *_ = key
            bucket = _bucket(recipe, members[key])
            if turn == 0 and not is_repeated:
                self.buckets.append(bucket)
            else:
                # torch looks at the state of a whole group before it updates any of it.
                fresh = None if is_known else bucket.fresh
                self.later.append(Later(members[key], bucket, is_repeated, fresh))
        self.together = [bucket for bucket in self.buckets if not bucket.copies]
        """Those that are launched without waiting for each other."""
        copying = [bucket for bucket in self.buckets if bucket.copies]
        self.in_turn: list[Bucket | SparseBucket | Later] = [*copying, *self.later]
        """Those whose launch must find all before it at their end, and end itself."""
        self._read_numbers(optimizer, group)

    def read(self, optimizer: FusedOptimizer, group: Group) -> bool:
        """Read the group's numbers; False if the plan does not fit the group.

        Raises:
            ValueError: a hyper-parameter is NaN.
        """
        if self.later or _implementation(optimizer, group) != self._implementation:
            return False
        if not are_same_objects(group["params"], self._params):
            return False
        self._read_numbers(optimizer, group)
        return True

    def refresh(self) -> bool:
        """Take this step's gradients; False if the plan does not fit them."""
        for p in self._idle:
            if p.grad is not None:
                return False
        return all(map(_refresh, self.buckets))

    def _read_numbers(self, optimizer: FusedOptimizer, group: Group) -> None:
        numbers = optimizer._numbers(group)
        if math.isnan(sum(numbers.values())):  # a NaN among them, or two infinities
            optimizer._check_numbers(group)
        self.settings = Settings(numbers, -1.0 if group.get("maximize") else 1.0)
        hyper_parameters = [group[name] for name in group if name not in ("params", "param_names")]
        self.is_final = (
            not self.later
            and not optimizer._number_attributes
            and all(map(_is_unchanging, hyper_parameters))
        )


def _implementation(optimizer: FusedOptimizer, group: Group) -> tuple[Any, ...]:
    """What ``group`` says of how its step is to be computed, and the kernels that do."""
    return (*map(group.get, OPTIONS), *optimizer._kernels(group))


def _is_unchanging(value: object) -> bool:
    """Whether a hyper-parameter is what it was while it is the same object: no tensor is."""
    if isinstance(value, tuple):
        return all(map(_is_unchanging, value))
    return isinstance(value, _UNCHANGING)
