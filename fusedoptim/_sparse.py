"""The update of the rows that a sparse gradient touches, by the kernels that update whole tensors.

To a kernel, each touched row of an embedding table is a tensor of its own: a row of the launch
block. Rows that occur more than once in the gradient are summed first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fusedoptim._bucket import (
    Numbers,
    Recipe,
    Settings,
    check_shape,
    check_whole,
    state_tensor,
    variant_of,
)
from fusedoptim._device import queue_of
from fusedoptim._gradients import grad_factor
from fusedoptim._launch import Chunks, Indices, LaunchBlock, kernel_for, row_places
from fusedoptim._sparse_gradient import SparseGradient, row_numbers
from fusedoptim._steps import KEY, StepCounts, Steps
from fusedoptim._tensors import (
    DTYPES,
    Candidate,
    Group,
    State,
    facts_of,
    increment_version,
    is_lazy,
)
from fusedoptim.kernels.language import Role

# A launch block is made for twice the rows that are needed first: making one for 10,000 rows takes
# 0.4 ms, and the next gradient seldom touches as many rows as this one.
_GROWTH = 2


class SparseRecipe(Recipe, Protocol):
    """What a sparse bucket asks the optimizer for."""

    @property
    def sparse_state(self) -> tuple[str, ...]:
        """Names of the state that has only the rows that some gradient touched."""


class _Rows(NamedTuple):
    """A launch block for rows of one width, and how they are cut."""

    block: LaunchBlock
    chunks: Chunks
    width: int

    def fit(self, rows: int, width: int) -> bool:
        """Whether there are that many rows of this width."""
        return rows <= len(self.chunks.numels) and width == self.width


class SparseBucket:
    """One parameter with a sparse gradient, and its state."""

    @staticmethod
    def takes(recipe: SparseRecipe, candidate: Candidate, states: Mapping[Tensor, State]) -> bool:
        """Whether rows can be updated by themselves: the gradient has some, and the state.

        Dense state of a kind that sparse gradients make sparse has all rows, so all are updated.
        """
        state = states.get(candidate.param, {})
        dense = [
            name
            for name in recipe.sparse_state
            if state.get(name) is not None and state[name].layout is torch.strided
        ]
        return candidate.grad.sparse_dim() > 0 and not dense

    def __init__(
        self, recipe: SparseRecipe, candidate: Candidate, states: Mapping[Tensor, State]
    ) -> None:
        """Find or make the state; nothing that the user holds is written to.

        Args:
            recipe: what the optimizer wants done.
            candidate: a parameter that passed its checks, and for which :meth:`takes` is true.
            states: the optimizer's.
        """
        self._param = candidate.param
        self._facts = facts_of([candidate.param])
        self._target = self._param.detach()
        if not self._param.is_contiguous() or is_lazy(self._param):
            self._target = torch.empty(
                self._param.shape, dtype=self._param.dtype, device=self._param.device
            )
        self.copies = self._target.data_ptr() != self._param.data_ptr()
        """Whether a launch updates a copy of the parameter, made as it starts."""
        self._components = 2 if candidate.param.is_complex() else 1
        self.device = candidate.param.device
        (kernel,) = recipe.kernels
        self._kernel = kernel_for(queue_of(self.device), kernel, variant_of(recipe, self._param))
        dtype, self._state_dtype = DTYPES[self._param.dtype]
        self.real = torch.float64 if dtype == "f64" else torch.float32
        row = self._kernel.module.row
        names = [name for name, role in row if role in (Role.STATE, Role.TRAIL)]
        self._held = held = states.get(self._param, {})
        has_steps = any(role is Role.ROW_SCALAR for _, role in row)
        check_whole(recipe, candidate.name, held, [*names, KEY] if has_steps else names)
        self._steps = StepCounts([held]) if has_steps else None
        self._dense = {
            name: state_tensor(recipe, candidate.name, name, held, self._target, self._state_dtype)
            for name in names
            if name not in recipe.sparse_state
        }
        self._sparse: dict[str, Tensor | None] = {
            name: held.get(name) for name in names if name in recipe.sparse_state
        }
        for name, buffer in self._sparse.items():
            if buffer is not None:
                check_shape(recipe, candidate.name, name, buffer, self._param.shape)
        self._dense_facts = facts_of(list(self._dense.values())) if self._dense else None
        self._row_flags = [name for name, role in row if role is Role.ROW_FLAG]
        self.fresh: Sequence[bool] | None = None
        self._laid_out: _Rows | None = None
        self._events: list[Any] = []
        self._has_no_rows = False
        self._is_committed = False
        self._read_gradient(candidate.grad)

    def _read_gradient(self, grad: Tensor) -> None:
        for name, buffer in self._sparse.items():
            if buffer is not None and buffer.sparse_dim() != grad.sparse_dim():
                raise RuntimeError(
                    f"a gradient of shape {tuple(grad.shape)} has {grad.sparse_dim()} sparse "
                    f"dimensions, and the state {name!r} that earlier gradients made "
                    f"{buffer.sparse_dim()}; compute all gradients of a parameter in the same way"
                )
        self._grad = SparseGradient(grad)

    def refresh(self) -> bool:
        """Take this step's gradient; False if anything is not as it was when checked."""
        param, grad = self._param, self._param.grad
        state = {**self._dense, **self._sparse}
        if (
            not self._is_committed
            or grad is None
            or grad.layout is not torch.sparse_coo
            or (grad.shape, grad.dtype, grad.device) != (param.shape, param.dtype, param.device)
            or not self._facts.check(param)
            or not (self.copies or self._target.data_ptr() == param.data_ptr())
            or queue_of(self.device) is not self._kernel.queue
            or any(self._held.get(name) is not tensor for name, tensor in state.items())
            or not (self._dense_facts is None or self._dense_facts.check(*self._dense.values()))
            or not (self._steps is None or self._steps.are_held_by([self._held]))
        ):
            return False
        self._read_gradient(grad)
        return True

    def sum_of_squares(self) -> Tensor:
        """The squares of the gradient's elements, summed."""
        return self._grad.sum_of_squares(self.real)

    def launch(
        self,
        settings: Settings,
        common: Tensor | None,
        row_numbers: Callable[[Group, Steps], Numbers],
        group: Group,
    ) -> None:
        """Start the update; see :meth:`fusedoptim._bucket.Bucket.launch`."""
        if self.copies:
            self._target.copy_(self._param.detach())
        fresh = self._gather_sparse_state()
        block, count = self._write_rows()
        for flag in self._row_flags:
            block.write(flag, fresh, count)
        if self._steps is not None:
            for column, values in row_numbers(group, self._steps.next()).items():
                block.write(column, values, count)
        # Kept until the launch has ended.
        self._grad_factor = factor = grad_factor(settings.sign, common, self.real, self.device)
        head = {**settings.numbers, "grad_factor": factor.data_ptr()}
        block.write_head(self._kernel.in_order(head))
        self._has_no_rows = count == 0
        block.launch(self._events, count)
        increment_version([self._param])

    def _gather_sparse_state(self) -> bool:
        """Find the rows to update: those of the gradient and of the sparse state.

        Returns:
            whether the sparse state is made now.
        """
        fresh = False
        self._rows = self._grad.rows
        self._new: dict[str, Tensor] = {}
        for name, buffer in self._sparse.items():
            fresh = buffer is None
            known, values = self._rows[:0], self._grad.values[:0]
            if buffer is not None:
                old = buffer.coalesce()
                known, values = row_numbers(old.indices(), old.shape), old.values()
            self._rows = np.union1d(self._rows, known)
            self._new[name] = _spread(values.to(self._state_dtype), known, self._rows)
        return fresh

    def _write_rows(self) -> tuple[LaunchBlock, int]:
        """Write addresses to the block; return it, and how many of its rows count."""
        rows, grad = self._rows, self._grad
        self._no_grad = grad.values.new_zeros(grad.values.shape[1:])
        grad_places = grad.places
        if len(rows) > len(grad_places):
            grad_places = np.full(len(rows), row_places(self._no_grad[None])[0], dtype=np.int64)
            grad_places[np.searchsorted(rows, grad.rows)] = grad.places

        block, chunks, _ = self._rows_for(len(rows), self._no_grad.numel() * self._components)
        count = int(chunks.counts[: len(rows)].sum())

        def write(column: str, array: Tensor, places: Indices) -> None:
            if count != len(rows):
                size = array.element_size() // self._components
                places = places[chunks.owner[:count]] + chunks.start[:count] * size
            block.write(column, places, count)

        write("grad", grad.values, grad_places)
        for name, array in {"param": self._target, **self._dense}.items():
            write(name, array, row_places(array, rows, grad.sparse_dim))
        for name, array in self._new.items():
            write(name, array, row_places(array))
        return block, count

    def _rows_for(self, rows: int, width: int) -> _Rows:
        if self._laid_out is None or not self._laid_out.fit(rows, width):
            chunks = Chunks([width] * (_GROWTH * rows), self._kernel.shape.chunk)
            self._laid_out = _Rows(LaunchBlock(self._kernel, chunks.lengths), chunks, width)
        return self._laid_out

    def _of_rows(self, rows: Indices, values: Tensor) -> Tensor:
        """A coalesced tensor of the parameter's shape with ``values`` in these rows."""
        shape = self._param.shape
        indices = np.stack(np.unravel_index(rows, shape[: self._grad.sparse_dim]))
        return torch.sparse_coo_tensor(
            torch.from_numpy(indices).to(self.device),
            values,
            shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def finish(self, states: MutableMapping[Tensor, State]) -> None:
        """See :meth:`fusedoptim._bucket.Bucket.finish`."""
        if self._laid_out is None or not (self._events or self._has_no_rows):
            return
        self._laid_out.block.wait_on_host()
        if self.copies:
            self._param.detach().copy_(self._target)
        made: State = dict(self._dense)
        for name, values in self._new.items():
            made[name] = self._of_rows(self._rows, values)
        if self._steps is not None:
            self._steps.count_up()
            (made[KEY],) = self._steps.views
        if made:
            self._held = states[self._param]
            self._held.update(made)
        self._sparse = {name: made[name] for name in self._sparse}
        self._is_committed = True
        self._events = []
        self._has_no_rows = False


def _spread(values: Tensor, numbers: Indices, among: Indices) -> Tensor:
    """``values`` of the rows ``numbers``, with rows of zeros for the others ``among`` which."""
    if len(numbers) == len(among):
        return values.contiguous()
    places = torch.from_numpy(np.searchsorted(among, numbers)).to(values.device)
    result = torch.zeros((len(among), *values.shape[1:]), dtype=values.dtype, device=values.device)
    return result.index_copy_(0, places, values)
