"""What a step needs to know about an optimizer, and nothing else."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedoptim.step.sharding import ShardedGradients
from fusedoptim.step.step_counts import Steps
from fusedoptim.step.tensors import Group, State, new_state

Numbers = Mapping[str, Any]
"""A kernel's scalars and flags, by the names of its arguments."""


class Candidate(NamedTuple):
    """A parameter with a gradient, and what errors call it."""

    param: Tensor
    grad: Tensor
    name: str


class UpdateDefinition(Optimizer):
    """What a class of optimizers defines: its kernels, their numbers, and its state."""

    _sparse_state: tuple[str, ...] = ()
    """Names of the state that a sparse gradient creates and that is then sparse, as in torch."""
    _optional_state: frozenset[str] = frozenset()
    """Names of state that a parameter may lack even if it has other state of earlier steps."""
    _saved_options: frozenset[str] = frozenset()
    """Hyper-parameters that each group has in a checkpoint of any version of the class."""
    _saved_state: frozenset[str] = frozenset()
    """Names of the state, except optional, that a parameter has in a checkpoint if it has any."""
    _number_attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes of the optimizer on which its numbers depend."""

    def _kernels(self, group: Group, one_row: bool) -> tuple[str, ...]:
        """The names of the kernels that update tensors of ``group``, in order.

        ``one_row`` says whether each tensor is one row, which one work-group walks.
        """
        raise NotImplementedError

    def _sharded_kernels(self, group: Group) -> tuple[str, ...]:
        """The names of the kernels that update tensors divided among processes.

        If there are several kernels, a collective follows the first, which must write nothing but
        sums, so that a step whose collective fails has changed nothing.
        """
        return self._kernels(group, one_row=False)

    def _numbers(self, group: Group) -> Numbers:
        """The kernels' scalars and flags for the current hyper-parameters of ``group``."""
        raise NotImplementedError

    def _row_numbers(self, group: Group, numbers: Numbers, steps: Steps) -> dict[str, Steps]:
        """The scalars that depend on how many ``steps`` a parameter has taken, this one included.

        ``numbers`` are those of :meth:`_numbers`. Kernels without a RowScalar, such as SGD's, have
        none.
        """
        return {}

    def _initial_state(self, group: Group, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        """The state ``name`` of a parameter that has taken no step, laid out like ``target``."""
        return new_state(target, dtype).zero_()

    def _check_options(self, group: Group) -> None:
        """Raise if ``group`` asks for an implementation of the step other than the fused one."""
        raise NotImplementedError

    def _check_sparse(self, group: Group, candidate: Candidate) -> None:
        """Raise if a sparse gradient cannot be applied as ``group`` asks."""
        raise NotImplementedError


class UpdateRule:
    """How an optimizer updates one of its groups."""

    def __init__(self, optimizer: UpdateDefinition, group: Group) -> None:
        # Weak, because plans keep rules, and an optimizer must go when its last user drops it.
        self._reference = weakref.ref(optimizer)
        self.group = group
        self.optimizer_name = type(optimizer).__name__
        """The optimizer's name in errors."""
        self.defaults = optimizer.defaults
        self.states: MutableMapping[Tensor, State] = optimizer.state
        self.optional_state = optimizer._optional_state
        self.sparse_state = optimizer._sparse_state
        self.sharded: ShardedGradients | None = None
        """The gradients of the optimizer's DTensors; None if it has none."""
        self.depends_on_optimizer = bool(optimizer._number_attributes)
        """Whether the numbers depend on more than the group."""

    def _owner(self) -> UpdateDefinition:
        owner = self._reference()
        assert owner is not None  # it is stepping
        return owner

    def is_split(self, param: Tensor) -> bool:
        """Whether a parameter is the upper half of float32 values."""
        optimizer: Any = self._owner()
        return bool(optimizer.is_split(param))

    def trail_before_first_step(self, param: Tensor) -> Tensor | None:
        """The trail of a split parameter that has taken no step."""
        optimizer: Any = self._owner()
        trail: Tensor | None = optimizer.halves.before_first_step(param)
        return trail

    def param_numbers(self) -> dict[Tensor, int]:
        """The position of each parameter among all of the optimizer's."""
        groups = self._owner().param_groups
        return {p: i for i, p in enumerate(p for group in groups for p in group["params"])}

    def kernels(self, one_row: bool) -> tuple[str, ...]:
        """See :class:`UpdateDefinition`, also for the methods below."""
        return self._owner()._kernels(self.group, one_row)

    def sharded_kernels(self) -> tuple[str, ...]:
        """The kernels for tensors of the group that are divided among processes."""
        return self._owner()._sharded_kernels(self.group)

    def numbers(self) -> Numbers:
        """The scalars and flags of a launch."""
        return self._owner()._numbers(self.group)

    def row_numbers(self, numbers: Numbers, steps: Steps) -> Mapping[str, Steps]:
        """The scalars of rows."""
        owner = self._reference()  # without the call of _owner(): this one is in every step
        assert owner is not None
        return owner._row_numbers(self.group, numbers, steps)

    def initial_state(self, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        """The initial state of one parameter."""
        return self._owner()._initial_state(self.group, name, target, dtype)

    def check_options(self) -> None:
        """Check the options of the group."""
        self._owner()._check_options(self.group)

    def check_sparse(self, candidate: Candidate) -> None:
        """Check a sparse gradient against the options of the group."""
        self._owner()._check_sparse(self.group, candidate)
