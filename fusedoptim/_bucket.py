"""The parameters of one group that share device and dtype: one launch block, one launch.

A bucket is made from tensors that were checked one by one, and serves every step at which it
finds them as they were. Gradients are new tensors at every step: their addresses are read each
time, and written when they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim._launch import LaunchBlock, kernel_for
from fusedoptim._tensors import DTYPES, RUN, Candidate, State, TensorRun, laid_out_like
from fusedoptim.allocator import borrowed_queue, queue
from fusedoptim.kernels.language import Role


class Bucket:
    """Parameters of one device and dtype with their gradients and state, ready to launch."""

    def __init__(
        self,
        optimizer: str,
        kernel_name: str,
        candidates: Sequence[Candidate],
        states: Mapping[Tensor, State],
    ) -> None:
        """Lay out the launch; nothing that the user holds is written to.

        Args:
            optimizer: name of the class, for errors.
            kernel_name: the kernel that updates the parameters.
            candidates: parameters of one device and dtype that passed their checks.
            states: the optimizer's. What a parameter lacks is made now, and added to it when the
                launch has written it.

        Raises:
            ValueError: a state tensor has not its parameter's shape.
        """
        first = candidates[0].param
        dtype, state_dtype = DTYPES[first.dtype]
        self._device = first.device
        self._kernel = kernel_for(_queue_of(first.device), kernel_name, dtype)
        row = self._kernel.module.row
        names = [argument.name for argument in row if argument.role is Role.STATE]
        self._row_flags = [argument.name for argument in row if argument.role is Role.ROW_FLAG]

        self._runs = [TensorRun(candidates[i : i + RUN]) for i in range(0, len(candidates), RUN)]
        self._params = [p for run in self._runs for p in run.params]
        self._state_names = names
        held = [states.get(p, {}) for p in self._params]
        targets = [target for run in self._runs for target in run.targets]
        self._fresh = [any(state.get(name) is None for name in names) for state in held]
        self._uncommitted: list[State] | None = [
            {
                name: _state_tensor(optimizer, candidate.name, name, state, target, state_dtype)
                for name in names
            }
            for candidate, state, target in zip(candidates, held, targets)
        ]
        self._set_states(self._uncommitted)
        self._launched = False
        self.copies = any(run.copied for run in self._runs)
        """Whether a launch updates copies of parameters, made as it starts."""

        components = 2 if first.is_complex() else 1
        widths = {a.name: first.element_size() // components for a in row if a.role is Role.STORAGE}
        widths |= dict.fromkeys(names, state_dtype.itemsize // components)
        numels = [components * n for run in self._runs for n in run.numels]
        self.elements = sum(numels)
        self._block = LaunchBlock(self._kernel, numels, widths)
        self._block.write_addresses("param", [a for run in self._runs for a in run.addresses])
        self._grad_addresses: list[int] = []
        self._write_gradients()
        for name in names:
            self._block.write_addresses(
                name, [a for run in self._runs for a in run.addresses_of(name)]
            )
        for flag in self._row_flags:
            self._block.write_flags(flag, self._fresh)

    def _set_states(self, states: list[State]) -> None:
        start = 0
        for run in self._runs:
            run.set_states(states[start : start + len(run.params)], self._state_names)
            start += len(run.params)

    def _write_gradients(self) -> None:
        addresses = [a for run in self._runs for a in run.grad_addresses]
        if addresses != self._grad_addresses:
            self._block.write_addresses("grad", addresses)
            self._grad_addresses = addresses

    def refresh(self) -> bool:
        """Take this step's gradients; False if any tensor is not as it was when checked."""
        if self._uncommitted is not None:  # its launch never happened
            return False
        if not self._kernel.on_host and _queue_of(self._device) is not self._kernel.queue:
            return False  # torch's current stream is another one now
        for run in self._runs:
            if not run.read_gradients():
                return False
        self._write_gradients()
        return True

    def launch(self, scalars: Mapping[str, float]) -> None:
        """Start the update with the step's scalars, given by name."""
        for run in self._runs:
            for param, target in run.copied:
                target.copy_(param.detach())
        self._block.write_scalars(self._kernel.in_order(scalars))
        self._launched = True
        self._block.launch()
        # Autograd must know of writes that it did not see; on the CPU the kernel runs meanwhile.
        torch.autograd.graph.increment_version(self._params)

    def finish(self, states: MutableMapping[Tensor, State]) -> None:
        """Wait if on the CPU, and add to the optimizer's ``states`` what the launch made."""
        if not self._launched:
            return
        self._launched = False
        try:
            self._block.wait_on_host()
        finally:  # an interrupt arrives when the kernel has ended
            for run in self._runs:
                for param, target in run.copied:
                    param.detach().copy_(target)
                run.grads = []
            if self._uncommitted is not None:
                self._commit(states, self._uncommitted)

    def _commit(self, states: MutableMapping[Tensor, State], made: list[State]) -> None:
        if self._state_names:
            for p, state in zip(self._params, made):
                states[p].update(state)
            self._set_states([states[p] for p in self._params])
        if any(self._fresh):
            for flag in self._row_flags:
                self._block.write_flags(flag, [False] * len(self._params))
        self._uncommitted = None


def _queue_of(device: torch.device) -> Any:
    if device.type == "cpu":
        return queue("cpu")
    # torch's own stream keeps the order with the work around the step.
    return borrowed_queue(torch.xpu.current_stream(device).sycl_queue)


def _state_tensor(
    optimizer: str, owner: str, name: str, state: State, target: Tensor, dtype: torch.dtype
) -> Tensor:
    """The state ``name`` as a kernel takes it: of ``dtype``, in the element order of ``target``."""
    value = state.get(name)
    if value is None:
        return torch.empty_like(target, dtype=dtype, requires_grad=False)
    if value.shape != target.shape:
        raise ValueError(
            f"{optimizer}: the state {name!r} of {owner} has shape {tuple(value.shape)} and the "
            f"parameter {tuple(target.shape)}; load the state_dict of the same model, or delete "
            "optimizer.state[parameter]"
        )
    if value.layout is not torch.strided:
        value = value.to_dense()
    return laid_out_like(target, value.to(target.device, dtype))
