"""Whether tensors and objects are unchanged since the last step.

Between two steps a user may replace a gradient, swap a parameter's storage, or load or move state.
A launch writes through raw addresses, so every step must notice all of that before anything is
written.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor

from fusedoptim._torch_private import TensorGuards, local_tensor
from fusedoptim.step.rule import Candidate
from fusedoptim.step.sharding import ShardedGradients, is_dtensor, local_of
from fusedoptim.step.tensors import State, memory_of

RUN = 150
"""Parameters that are read together. A pass over a list reads one fact of each tensor. A few
hundred tensors, gradients and state included, stay in the second-level cache from pass to pass."""

_GRAD = operator.attrgetter("grad")
_IS_NESTED: Any = Tensor.is_nested.__get__  # type: ignore[attr-defined]  # it is torch's getter


def are_same_objects(some: Collection[object], others: Collection[object]) -> bool:
    """Whether both hold the same objects in the same order; tensors have an ``==`` of their own."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def may_be_compared(values: Iterable[Any]) -> bool:
    """Whether guards may be asked about these values: a nested tensor would end the process.

    False too if one is not a tensor.
    """
    try:
        return True not in map(_IS_NESTED, values)
    except TypeError:
        return False


def tensor_guards(tensors: Sequence[Tensor]) -> TensorGuards:
    """A check that all a kernel relies on is unchanged in tensors, except for their addresses."""
    return TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


class _Shards:
    """DTensors of one run, replaced by their local shards."""

    def __init__(self, params: Sequence[Tensor], gradients: ShardedGradients) -> None:
        """Find the parameters' gradients in ``gradients``."""
        self._params = params
        self._gradients = gradients
        self._own_gradients = gradients.of_each(params)

    def locals_of(self, states: Sequence[Tensor]) -> list[Tensor] | None:
        """The shards of parameters, gradients and ``states``; None if a gradient does not fit.

        A gradient must be a DTensor on its parameter's mesh; other placements were redistributed.
        Those of state are not read again: state with other placements has other memory.
        """
        if not self._gradients.are_placed:
            return None
        try:
            return [
                *map(local_tensor, self._params),
                *map(local_tensor, self._own_gradients()),
                *map(local_tensor, states),
            ]
        except AttributeError:  # a tensor is not a DTensor, or there is no gradient
            return None


class TensorRun:
    """At most RUN parameters of one device and dtype, with facts noted when they were checked."""

    def __init__(self, candidates: Sequence[Candidate], sharded: ShardedGradients | None) -> None:
        """Record tensors that have passed their checks; their state follows in :meth:`watch`.

        ``sharded`` has the gradients of DTensors.
        """
        self.params = [candidate.param for candidate in candidates]
        self.locals = list(map(local_of, self.params))
        """The parameters, or this process's shards of them."""
        self._shards: _Shards | None = None
        if sharded is not None and is_dtensor(self.params[0]):
            self._shards = _Shards(self.params, sharded)
        self.targets = list(map(memory_of, self.params))
        """The tensors that kernels write."""
        self._grads = [local_of(candidate.grad) for candidate in candidates]
        self.held = list(map(memory_of, self._grads, self.targets))
        """This step's tensors, held until its kernel has ended, as another thread may drop them."""
        self.grad_addresses = list(map(Tensor.data_ptr, self.held))
        """The gradients' addresses; a new list if one of them may differ from the last step's."""
        self._empty = [p.numel() for p in self.locals].count(0)
        self._grad_slice = slice(len(candidates), 2 * len(candidates))  # in a list of all tensors

    def watch(self, states: Sequence[State], names: Sequence[str], spread: int) -> None:
        """Make :meth:`refresh` compare with the present tensors, before any of them is dropped.

        Args:
            states: the parameters' states, in order; for DTensors, their local shards.
            names: the names of the tensors in them that a kernel updates.
            spread: how many of the names, from the first on, are spread over processes like their
                parameters.
        """
        self._wrapped = spread * len(self.params)
        self.states = states
        """The states in which :meth:`refresh` finds the tensors."""
        self._get_state = list(map(operator.itemgetter, names))
        updated = [get(state) for get in self._get_state for state in states]
        used, targets = [*self._grads, *updated], self.targets * (1 + len(names))
        memory = [*self.held, *map(memory_of, updated, targets)]
        self._elsewhere = [
            (i, targets[i - len(targets)])
            for i, (tensor, known) in enumerate(zip(used, memory), start=len(self.params))
            if tensor is not known
        ]
        """Tensors of which kernels use a copy: their places in a list of all tensors, and the
        parameters' memory."""
        self._guards = tensor_guards([*self.locals, *used])
        self._addresses = list(map(Tensor.data_ptr, [*self.locals, *memory]))
        self.held = [*used, *memory]
        self._grads = []

    def refresh(self) -> bool:
        """Take this step's gradients; False if any tensor differs from when it was watched."""
        # One list of all tensors: a pass costs more than the items of a short list.
        tensors: list[Tensor] = []
        if self._shards is None:
            tensors += self.params
            tensors += map(_GRAD, self.params)
        try:
            for get in self._get_state:
                tensors += map(get, self.states)
        except KeyError:  # state was removed
            return False
        if self._shards is not None:
            unwrapped = self._shards.locals_of(tensors[: self._wrapped])
            if unwrapped is None:
                return False
            unwrapped += tensors[self._wrapped :]
            tensors = unwrapped
        if not self._guards.check(*tensors):
            return False
        for i, target in self._elsewhere:
            tensors[i] = memory_of(tensors[i], target)
        self.held = tensors
        addresses = list(map(Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            expected = self._addresses.copy()
            expected[self._grad_slice] = grad_addresses = addresses[self._grad_slice]
            if addresses != expected or grad_addresses.count(0) != self._empty:
                return False
            self.grad_addresses = grad_addresses  # first: these must not be known but not written
            self._addresses = addresses
        return True
