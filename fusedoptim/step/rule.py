"""What a step needs to know of an optimizer, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fusedoptim.step.step_counts import Steps
from fusedoptim.step.tensors import Group, State

Numbers = Mapping[str, Any]
"""A kernel's scalars and flags, by the names of its arguments."""


class Candidate(NamedTuple):
    """A parameter with a gradient, and what errors call it."""

    param: Tensor
    grad: Tensor
    name: str


class UpdateRule(Protocol):
    """How one parameter group is updated."""

    @property
    def optimizer(self) -> str:
        """What errors call the optimizer."""

    @property
    def group(self) -> Group:
        """The parameter group."""

    @property
    def states(self) -> MutableMapping[Tensor, State]:
        """The optimizer's state."""

    def kernels(self, one_row: bool) -> tuple[str, ...]:
        """Names of the kernels that make an update, in order.

        Args:
            one_row: whether each tensor is one row, which one work-group walks.
        """

    @property
    def optional_state(self) -> frozenset[str]:
        """Names of the state that a parameter may lack though it has taken steps."""

    @property
    def sparse_state(self) -> Sequence[str]:
        """Names of the state that has only the rows which some sparse gradient has touched."""

    @property
    def depends_on_optimizer(self) -> bool:
        """Whether the numbers depend on more than the group."""

    def is_split(self, param: Tensor) -> bool:
        """Whether ``param`` is the upper half of float32 values."""

    def numbers(self) -> Numbers:
        """The kernels' scalars and flags for the group's present hyper-parameters."""

    def row_numbers(self, numbers: Numbers, steps: Steps) -> Mapping[str, Steps]:
        """The scalars that depend on how many ``steps`` a parameter has taken, this one included.

        Args:
            numbers: what :meth:`numbers` returned.
            steps: of each parameter, or one count for all.
        """

    def initial_state(self, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        """The state ``name`` of a parameter that has taken no step, laid out like ``target``."""

    def check_options(self) -> None:
        """Raise if the group asks for something that a fused step cannot do."""

    def check_sparse(self, candidate: Candidate) -> None:
        """Raise if a sparse gradient cannot be applied as the group asks."""
