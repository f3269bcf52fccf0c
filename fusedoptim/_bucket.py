"""The parameters of one group that share device and dtype: their launch blocks, their launches.

A bucket is made from tensors that were checked one by one, and serves every step at which it
finds them as they were. Gradients are new tensors at every step: their addresses are read each
time, and written when they differ.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fusedoptim._device import queue_of
from fusedoptim._gradients import grad_factor
from fusedoptim._launch import Chunks, LaunchBlock, kernel_for, row_places
from fusedoptim._modes import has_memory
from fusedoptim._pipeline import Pipeline
from fusedoptim._steps import KEY, StepCounts, Steps
from fusedoptim._tensors import (
    DTYPES,
    RUN,
    TRAIL,
    Candidate,
    Group,
    State,
    TensorRun,
    increment_version,
    laid_out_like,
)
from fusedoptim.kernels.language import Role

Numbers = Mapping[str, Any]


class Settings(NamedTuple):
    """What a group's hyper-parameters come to."""

    numbers: Numbers
    """The kernels' scalars and flags."""
    sign: float
    """Of the gradients."""


class Recipe(Protocol):
    """What a bucket asks the optimizer for."""

    def initial_state(self, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        """The state ``name`` of a parameter that has taken no step, laid out like ``target``."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels that make an update, in order."""

    def is_split(self, param: Tensor) -> bool:
        """Whether ``param`` is the upper half of float32 values."""

    @property
    def name(self) -> str:
        """What errors call the optimizer."""

    @property
    def optional_state(self) -> frozenset[str]:
        """Names of the state that a parameter may lack though it has taken steps."""


# Chunks whose addresses are written one by one: 2 us for one, where numpy takes 9 us for any number
# up to a hundred, and between other work 7 us where numpy takes 29.
_FEW = 16

_grad_addresses = operator.attrgetter("grad_addresses")


class Bucket:
    """Parameters of one device and dtype with their gradients and state, ready to launch."""

    def __init__(
        self,
        recipe: Recipe,
        candidates: Sequence[Candidate],
        states: Mapping[Tensor, State],
        fresh: Sequence[bool] | None = None,
    ) -> None:
        """Lay out the launches; nothing that the user holds is written to.

        Args:
            recipe: what the optimizer wants done.
            candidates: parameters of one device and dtype that passed their checks.
            states: the optimizer's. What a parameter lacks is made now, and added to it when the
                launch has written it.
            fresh: for each candidate, whether its state counts as just made; found from
                ``states`` if None.

        Raises:
            ValueError: a state tensor has not its parameter's shape.
        """
        first = candidates[0].param
        self.device = first.device
        self._queue = queue_of(first.device)
        self._on_host = self._queue.sycl_device.is_cpu
        dtype, state_dtype = DTYPES[first.dtype]
        self._variant = variant_of(recipe, first)
        self.real = torch.float64 if dtype == "f64" else torch.float32
        kernels = [kernel_for(self._queue, name, self._variant) for name in recipe.kernels]
        arguments = dict.fromkeys(argument for kernel in kernels for argument in kernel.module.row)
        names = [name for name, role in arguments if role in (Role.STATE, Role.TRAIL)]
        has_steps = any(role is Role.ROW_SCALAR for _, role in arguments)
        self._row_flags = [name for name, role in arguments if role is Role.ROW_FLAG]

        self._runs = [TensorRun(candidates[i : i + RUN]) for i in range(0, len(candidates), RUN)]
        self._params = [p for run in self._runs for p in run.params]
        self._state_names = names
        held = [states.get(p, {}) for p in self._params]
        targets = [target for run in self._runs for target in run.targets]
        self.fresh = fresh or [any(state.get(name) is None for name in names) for state in held]
        for candidate, state in zip(candidates, held):
            check_whole(recipe, candidate.name, state, [*names, KEY] if has_steps else names)
        self._steps = StepCounts(held) if has_steps else None
        self._uncommitted: list[State] | None = [
            {
                name: state_tensor(recipe, candidate.name, name, state, target, state_dtype)
                for name in names
            }
            for candidate, state, target in zip(candidates, held, targets)
        ]
        self._held = held
        for run, made in zip(self._runs, self._by_run(self._uncommitted)):
            run.watch(made, names)
        self._copied = [pair for run in self._runs for pair in run.copied]
        self.copies = bool(self._copied)
        """Whether a launch updates copies of parameters, made as it starts."""

        components = 2 if first.is_complex() else 1
        numels = [components * n for run in self._runs for n in run.numels]
        self._chunks = chunks = Chunks(numels, kernels[0].shape.chunk)
        is_few = len(chunks.owner) <= _FEW
        self._few = list(zip(chunks.owner.tolist(), chunks.start.tolist())) if is_few else None
        self._widths = {
            "param": first.element_size() // components,
            "grad": first.element_size() // components,
            **dict.fromkeys(names, state_dtype.itemsize // components),
        }
        if TRAIL in self._widths:
            self._widths[TRAIL] = 2
        self._pipeline = Pipeline(kernels, self._chunks, self.device)
        self._norm: LaunchBlock | None = None
        self._squares: Tensor | None = None
        self._write_addresses("param", [a for run in self._runs for a in run.addresses])
        for name in names:
            self._write_addresses(name, [state[name].data_ptr() for state in self._uncommitted])
        for flag in self._row_flags:
            self._pipeline.write(flag, np.array(self.fresh, dtype=np.int64)[self._chunks.owner])
        self._grad_addresses: list[int] = []
        self._written: list[list[int]] = []
        self._settings: Settings | None = None
        """What the head was written for, if it is valid for more than a step."""
        self._events: list[Any] | None = None
        """of this step's launches so far."""
        self._write_gradients(list(map(_grad_addresses, self._runs)))

    def _write_addresses(self, column: str, addresses: Sequence[int]) -> None:
        if self._few is None:
            self._pipeline.write(column, self._in_chunks(column, addresses))
        else:
            width = self._widths[column]
            places = [addresses[i] + start * width for i, start in self._few]
            self._pipeline.write_few(column, places)

    def _in_chunks(self, column: str, addresses: Sequence[int]) -> Any:
        base = np.array(addresses, dtype=np.uint64).view(np.int64)  # a GPU's may pass 2^63
        return base[self._chunks.owner] + self._chunks.start * self._widths[column]

    def _by_run(self, states: Sequence[State]) -> Iterator[Sequence[State]]:
        return (states[i : i + RUN] for i in range(0, len(states), RUN))

    def _write_gradients(self, by_run: list[list[int]]) -> None:
        self._written = []  # whatever is written if this is interrupted
        self._grad_addresses = list(itertools.chain.from_iterable(by_run))
        self._write_addresses("grad", self._grad_addresses)
        if self._norm is not None:
            self._norm.write("grad", self._in_chunks("grad", self._grad_addresses))
        self._written = by_run

    def refresh(self) -> bool:
        """Take this step's gradients; False if any tensor is not as it was when checked."""
        if self._uncommitted is not None:  # its launch never happened
            return False
        if not self._on_host and queue_of(self.device) is not self._queue:
            return False  # torch's current stream is another one now
        if self._steps is not None and not self._steps.are_held_by(self._held):
            return False
        for run in self._runs:
            if not run.refresh():
                return False
        addresses = list(map(_grad_addresses, self._runs))
        if addresses != self._written:
            self._write_gradients(addresses)
        return True

    def sum_of_squares(self) -> Tensor:
        """The squares of all gradients' elements, summed: a 0-d float64 or float32 tensor."""
        if self._norm is None or self._squares is None:
            kernel = kernel_for(self._queue, "sum_of_squares", self._variant)
            norm = LaunchBlock(kernel, self._chunks.lengths)
            norm.write("grad", self._in_chunks("grad", self._grad_addresses))
            self._squares = torch.empty(norm.rows, dtype=self.real, device=self.device)
            norm.write("sums", row_places(self._squares))
            self._norm = norm  # last, for an interrupt leaves nothing that is half written
        self._norm.launch()
        self._norm.wait_on_host()
        return self._squares.sum()

    def launch(
        self,
        settings: Settings,
        common: Tensor | None,
        row_numbers: Callable[[Group, Steps], Numbers],
        group: Group,
    ) -> None:
        """Start the update.

        Args:
            settings: of the group; the same object as long as they are the same.
            common: by which all the optimizer's gradients are multiplied: a 0-d tensor, or None.
            row_numbers: gives, from the group and the parameters' step counts, the scalars that
                depend on them.
            group: of the optimizer.
        """
        for param, target in self._copied:
            target.copy_(param.detach())
        if self._steps is not None:
            for column, values in row_numbers(group, self._steps.next()).items():
                by_chunk = values[self._chunks.owner] if values.ndim else values
                self._pipeline.write(column, by_chunk)
        if settings is not self._settings or common is not None:
            self._settings = None  # whatever is written if this is interrupted
            factor = grad_factor(settings.sign, common, self.real, self.device)
            self._pipeline.write_head({**settings.numbers, "grad_factor": factor.data_ptr()})
            self._grad_factor = factor  # kept until the launch has ended
            self._settings = settings if common is None else None
        events: list[Any] = []
        self._events = events
        for block in self._pipeline.to_launch:
            block.launch(events)
        increment_version(self._params)  # on the CPU the kernel runs meanwhile

    def finish(self, states: MutableMapping[Tensor, State]) -> None:
        """Wait if on the CPU, and add to the optimizer's ``states`` what the launch made.

        Nothing happens if nothing was launched. If this is interrupted, it can be called again.
        """
        events, blocks = self._events, self._pipeline.to_launch
        if events is None or (blocks and not events):  # interrupted before the first
            return
        for block in blocks[len(events) :]:  # interrupted before these
            block.launch(events)
        if self._on_host:
            for block in blocks:
                block.wait()
        if self._steps is not None:
            self._steps.count_up()
        if self._uncommitted is not None:
            self._commit(states, self._uncommitted)
        for param, target in self._copied:
            param.detach().copy_(target)
        for run in self._runs:
            run.release()
        self._events = None

    def _commit(self, states: MutableMapping[Tensor, State], made: list[State]) -> None:
        if self._steps is not None:
            for state, count in zip(made, self._steps.views):
                state[KEY] = count
        if self._state_names or self._steps is not None:
            for p, state in zip(self._params, made):
                states[p].update(state)
            self._held = [states[p] for p in self._params]
            for run, held in zip(self._runs, self._by_run(self._held)):
                run.states = held
        if any(self.fresh):
            for flag in self._row_flags:
                self._pipeline.write(flag, 0)
        self._uncommitted = None


def variant_of(recipe: Recipe, param: Tensor) -> str:
    """Which variant of the kernels updates ``param``."""
    return "split" if recipe.is_split(param) else DTYPES[param.dtype][0]


def check_shape(recipe: Recipe, owner: str, name: str, state: Tensor, shape: torch.Size) -> None:
    """Raise unless the state ``name`` has its parameter's shape."""
    if state.shape != shape:
        raise ValueError(
            f"{recipe.name}: the state {name!r} of {owner} has shape {tuple(state.shape)} and the "
            f"parameter {tuple(shape)}; load the state_dict of the same model, or delete "
            "optimizer.state[parameter]"
        )


def check_whole(recipe: Recipe, owner: str, state: State, names: Sequence[str]) -> None:
    """Raise if some of the state of these names is missing, or has no memory.

    Raises:
        KeyError: some is missing and some is not, as torch's classes find: an update would begin
            half of it anew.
        TypeError: a tensor is fake, or wraps another.
    """
    needed = set(names) - {TRAIL}
    lost = sorted(needed - state.keys() - recipe.optional_state)
    if lost and not needed.isdisjoint(state):
        raise KeyError(
            f"{recipe.name}: the state of {owner} has no {lost[0]!r}, and other state of earlier "
            "steps; load a whole state_dict, or delete optimizer.state[parameter] to begin it anew"
        )
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and not has_memory(value):
            raise TypeError(
                f"{recipe.name}: the state {name!r} of {owner} is a {type(value).__name__} with no "
                "memory of its own; make or load it outside of FakeTensorMode and the like"
            )


def state_tensor(
    recipe: Recipe, owner: str, name: str, state: State, target: Tensor, dtype: torch.dtype
) -> Tensor:
    """The state ``name`` as a kernel takes it: of ``dtype``, in the element order of ``target``."""
    value = state.get(name)
    if name == TRAIL:
        dtype = torch.int16
    if value is None:
        return recipe.initial_state(name, target, dtype)
    check_shape(recipe, owner, name, value, target.shape)
    if name == TRAIL and value.dtype != dtype:
        raise ValueError(
            f"{recipe.name}: the state {TRAIL!r} of {owner}, a lower half, is {value.dtype} and "
            f"not {dtype}; load a state_dict by this optimizer's own load_state_dict"
        )
    if value.layout is not torch.strided:
        value = value.to_dense()
    return laid_out_like(target, value.to(target.device, dtype))
