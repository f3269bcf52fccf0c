"""A parameter with a sparse gradient: only the rows that the gradient touches are updated.

To a kernel, each touched row of an embedding table is a tensor of its own: a row of the launch
block. Rows that occur more than once in the gradient are summed first.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedoptim.kernels.language import Role
from fusedoptim.launch.block import Chunks, Indices, LaunchBlock, row_addresses
from fusedoptim.launch.devices import queue_of
from fusedoptim.launch.kernel import kernel_for
from fusedoptim.launch.pipeline import Stage
from fusedoptim.step.checks import check_state_shape, check_state_whole
from fusedoptim.step.rule import Candidate, UpdateRule
from fusedoptim.step.scalars import Settings, grad_factor
from fusedoptim.step.sharding import Spread
from fusedoptim.step.sparse_gradient import SparseGradient, row_numbers
from fusedoptim.step.state import (
    local_state,
    names_of,
    state_arguments,
    state_tensors,
    variant_of,
)
from fusedoptim.step.step_counts import KEY, StepCounts
from fusedoptim.step.tensors import PARAM_DTYPES, State, memory_of
from fusedoptim.step.unchanged import tensor_guards

# A launch block is made for twice the rows that are needed at first: making one is expensive, and
# the next gradient seldom touches the same number of rows.
_GROWTH = 2


class _Block(NamedTuple):
    """A launch block for rows of one width, and how they are cut."""

    block: LaunchBlock
    chunks: Chunks
    width: int

    def fits(self, rows: int, width: int) -> bool:
        """Whether it has that many rows of this width."""
        return rows <= len(self.chunks.numels) and width == self.width


def can_update_rows(rule: UpdateRule, candidate: Candidate) -> bool:
    """Whether the rows of a sparse gradient can be updated alone: no other row has state."""
    state = rule.states.get(candidate.param, {})
    dense = [
        name
        for name in rule.sparse_state
        if state.get(name) is not None and state[name].layout is torch.strided
    ]
    return candidate.grad.sparse_dim() > 0 and not dense


class SparseRows:
    """One parameter with a sparse gradient, and its state."""

    fresh: Sequence[bool] | None = None
    """See :class:`fusedoptim.step.rows.Rows`."""
    spread: Spread | None = None
    """See :class:`fusedoptim.step.rows.Rows`."""

    def __init__(self, rule: UpdateRule, candidate: Candidate) -> None:
        """Find or make the state; nothing that the user holds is written to."""
        self._rule = rule
        self._param = param = candidate.param
        self.written = [param]
        self._guards = tensor_guards([param])
        self._target = memory_of(param, torch.contiguous_format).detach()
        self.copies = self._target.data_ptr() != param.data_ptr()
        """Whether an update works on a copy of the parameter, made when it begins."""
        dtype = PARAM_DTYPES[param.dtype]
        self._components, self._arithmetic = dtype.components, dtype.arithmetic
        self._state_dtype = dtype.state
        (kernel,) = rule.kernels(one_row=False)
        self._kernel = kernel_for(queue_of(param.device), kernel, variant_of(rule, param))
        row = self._kernel.layout.row
        names = state_arguments(row)
        self._held = held = local_state(rule, candidate.name, param, names)
        has_steps = bool(names_of(Role.ROW_SCALAR, row))
        check_state_whole(rule, candidate.name, held, [*names, KEY] if has_steps else list(names))
        self._steps = StepCounts([held]) if has_steps else None
        dense = {name: role for name, role in names.items() if name not in rule.sparse_state}
        self._dense = state_tensors(rule, candidate.name, dense, held, self._target)
        self._sparse: dict[str, Tensor | None] = {
            name: held.get(name) for name in names if name in rule.sparse_state
        }
        for name, buffer in self._sparse.items():
            if buffer is not None:
                check_state_shape(rule, candidate.name, name, buffer, param.shape)
        self._dense_guards = tensor_guards(list(self._dense.values())) if self._dense else None
        self._row_flags = names_of(Role.ROW_FLAG, row)
        self._laid_out: _Block | None = None
        self.runs_on_host = self._kernel.backend.runs_on_host
        self._is_committed = False
        self._read_gradient(candidate.grad)

    def _read_gradient(self, grad: Tensor) -> None:
        for name, buffer in self._sparse.items():
            if buffer is not None and buffer.sparse_dim() != grad.sparse_dim():
                raise RuntimeError(
                    f"a gradient of shape {tuple(grad.shape)} has {grad.sparse_dim()} sparse "
                    f"dimensions, and the state {name!r} from earlier gradients has "
                    f"{buffer.sparse_dim()}; compute all gradients of a parameter in the same way"
                )
        self._grad = SparseGradient(grad)

    def refresh(self) -> bool:
        """See :class:`fusedoptim.step.rows.Rows`."""
        param, grad = self._param, self._param.grad
        state = {**self._dense, **self._sparse}
        if (
            not self._is_committed
            or grad is None
            or grad.layout is not torch.sparse_coo
            or (grad.shape, grad.dtype, grad.device) != (param.shape, param.dtype, param.device)
            or not self._guards.check(param)
            or not (self.copies or self._target.data_ptr() == param.data_ptr())
            or queue_of(param.device) is not self._kernel.queue
            or any(self._held.get(name) is not tensor for name, tensor in state.items())
            or not (self._dense_guards is None or self._dense_guards.check(*self._dense.values()))
            or not (self._steps is None or self._steps.are_held_by([self._held]))
        ):
            return False
        self._read_gradient(grad)
        return True

    def sum_of_squares(self) -> Tensor:
        """See :class:`fusedoptim.step.rows.Rows`."""
        return self._grad.sum_of_squares(self._arithmetic)

    def prepare(self, settings: Settings, common: Tensor | None) -> Sequence[Stage]:
        """See :class:`fusedoptim.step.rows.Rows`."""
        device = self._param.device
        if self.copies:
            self._target.copy_(self._param.detach())
        fresh = self._gather_sparse_state()
        block, count = self._write_rows()
        for flag in self._row_flags:
            block.write(flag, fresh, count)
        if self._steps is not None:
            by_row = self._rule.row_numbers(settings.numbers, self._steps.next())
            for column, values in by_row.items():
                block.write(column, values, count)
        # Kept until the launch has ended.
        self._grad_factor = factor = grad_factor(settings.sign, common, self._arithmetic, device)
        block.write_head({**settings.numbers, "grad_factor": factor.data_ptr()})
        block.select(count)
        return [block] if count else []

    def _gather_sparse_state(self) -> bool:
        """Find the rows of the gradient and of the sparse state; True if the state is new."""
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
            self._new[name] = _with_zeros(values.to(self._state_dtype), known, self._rows)
        return fresh

    def _write_rows(self) -> tuple[LaunchBlock, int]:
        """Write addresses to the block; return it, and how many of its rows are in use."""
        rows, grad = self._rows, self._grad
        self._no_grad = grad.values.new_zeros(grad.values.shape[1:])
        grad_addresses = grad.addresses
        if len(rows) > len(grad_addresses):
            grad_addresses = np.full(
                len(rows), row_addresses(self._no_grad[None])[0], dtype=np.int64
            )
            grad_addresses[np.searchsorted(rows, grad.rows)] = grad.addresses

        block, chunks, _ = self._block_for(len(rows), self._no_grad.numel() * self._components)
        count = int(chunks.counts[: len(rows)].sum())

        def write(column: str, array: Tensor, addresses: Indices) -> None:
            if count != len(rows):
                size = array.element_size() // self._components
                addresses = addresses[chunks.owner[:count]] + chunks.start[:count] * size
            block.write(column, addresses, count)

        write("grad", grad.values, grad_addresses)
        for name, array in {"param": self._target, **self._dense}.items():
            write(name, array, row_addresses(array, rows, grad.sparse_dim))
        for name, array in self._new.items():
            write(name, array, row_addresses(array))
        return block, count

    def _block_for(self, rows: int, width: int) -> _Block:
        if self._laid_out is None or not self._laid_out.fits(rows, width):
            chunks = Chunks([width] * (_GROWTH * rows), self._kernel.shape.chunk)
            self._laid_out = _Block(LaunchBlock(self._kernel, chunks.lengths), chunks, width)
        return self._laid_out

    def _of_rows(self, rows: Indices, values: Tensor) -> Tensor:
        """A coalesced tensor of the parameter's shape with ``values`` in these rows."""
        shape = self._param.shape
        indices = np.stack(np.unravel_index(rows, shape[: self._grad.sparse_dim]))
        return torch.sparse_coo_tensor(
            torch.from_numpy(indices).to(self._param.device),
            values,
            shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def commit(self, states: MutableMapping[Tensor, State]) -> None:
        """See :class:`fusedoptim.step.rows.Rows`."""
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

    def release(self) -> None:
        """See :class:`fusedoptim.step.rows.Rows`."""
        nothing: Any = None  # refresh() and prepare() set them again
        self._grad = self._rows = self._new = self._no_grad = nothing


def _with_zeros(values: Tensor, numbers: Indices, among: Indices) -> Tensor:
    """``values`` of the rows ``numbers``, and zeros for the rows of ``among`` that lack values."""
    if len(numbers) == len(among):
        return values.contiguous()
    places = torch.from_numpy(np.searchsorted(among, numbers)).to(values.device)
    result = torch.zeros((len(among), *values.shape[1:]), dtype=values.dtype, device=values.device)
    return result.index_copy_(0, places, values)
