"""Parameters of one group, device and dtype, with strided gradients: all of them in one launch.

The rows are laid out from tensors that were checked one by one, and serve every step in which the
tensors are unchanged. Gradients are new tensors at every step, so their addresses are read each
time, and written where they differ.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

from torch import Tensor

from fusedoptim._torch_private import increment_version
from fusedoptim.kernels.language import Role
from fusedoptim.kernels.rounding import BLOCK
from fusedoptim.launch.block import Chunks
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.launch.kernel import Kernel, kernel_for
from fusedoptim.launch.pipeline import Pipeline, Stage
from fusedoptim.step.checks import check_state_whole
from fusedoptim.step.float8 import SCALES
from fusedoptim.step.rule import Candidate, UpdateRule
from fusedoptim.step.scalars import Settings, grad_factor
from fusedoptim.step.sharding import is_divided, like_param, spread_of
from fusedoptim.step.state import (
    local_state,
    names_of,
    state_arguments,
    state_tensors,
    state_width,
    variant_of,
)
from fusedoptim.step.step_counts import KEY, StepCounts
from fusedoptim.step.tensors import PARAM_DTYPES, State
from fusedoptim.step.unchanged import RUN, TensorRun

_MANY_WRITTEN = 256
"""From this many tensors on, their writes are counted while the launch runs
(docs/design/torch-threads.md)."""
_grad_addresses = operator.attrgetter("grad_addresses")


def _uses_sums(kernel: Kernel) -> bool:
    return bool(names_of(Role.CHUNK_SUMS, kernel.layout.row))


class DenseRows:
    """Parameters of one device and dtype with their gradients and state, ready to launch."""

    def __init__(
        self,
        rule: UpdateRule,
        candidates: Sequence[Candidate],
        kernels: Sequence[str],
        fresh: Sequence[bool] | None = None,
    ) -> None:
        """Lay out the launches; nothing that the user holds is written to.

        Args:
            rule: the group's rule. State that its parameters lack is made now, and added to the
                rule's ``states`` when the launch has written it.
            candidates: parameters of one device and dtype that passed their checks.
            kernels: names of the kernels of an update, in order.
            fresh: for each candidate, whether its state counts as just made; None to look it up.
        """
        first = candidates[0].param
        self._rule = rule
        self._device = first.device
        self._backend = BACKENDS[first.device.type]
        self.runs_on_host = self._backend.runs_on_host
        self._queue = self._backend.queue(first.device)
        self._variant = variant_of(rule, first)
        built = [kernel_for(self._queue, name, self._variant) for name in kernels]
        arguments = dict.fromkeys(argument for kernel in built for argument in kernel.layout.row)
        roles = state_arguments(arguments)
        self._row_flags = names_of(Role.ROW_FLAG, arguments)
        numbers = names_of(Role.PARAM_NUMBER, arguments)
        self._draws = bool(numbers)
        """Whether the kernels draw random words, which depend on the parameter and the step."""

        targets = self._find_memory(candidates)
        self._find_state(candidates, roles, fresh, bool(names_of(Role.ROW_SCALAR, arguments)))
        made = self._make_state(candidates, roles, targets)
        self._lay_out(built, targets)
        self._write_addresses(targets, roles, made)
        self._write_integers(numbers)
        self._count_writes_meanwhile()

    def _find_memory(self, candidates: Sequence[Candidate]) -> list[Tensor]:
        """Find the memory of parameters and gradients; return the tensors that kernels write."""
        self._runs = [
            TensorRun(candidates[i : i + RUN], self._rule.sharded)
            for i in range(0, len(candidates), RUN)
        ]
        self.params = [p for run in self._runs for p in run.params]
        self.spread = spread_of(self.params[0])
        shards = [p for run in self._runs for p in run.locals]
        targets = [target for run in self._runs for target in run.targets]
        self.written = self.params if self.spread is None else [*self.params, *shards]
        self._copied = [(p, t) for p, t in zip(shards, targets) if p is not t]
        self.copies = bool(self._copied)
        return targets

    def _find_state(
        self,
        candidates: Sequence[Candidate],
        roles: Mapping[str, Role],
        fresh: Sequence[bool] | None,
        has_steps: bool,
    ) -> None:
        """Check the state that there is, and copy its step counts."""
        rule = self._rule
        self._held = [local_state(rule, c.name, c.param, roles) for c in candidates]
        self.fresh: Sequence[bool] | None = fresh or [
            any(state.get(name) is None for name in roles) for state in self._held
        ]
        # Scales belong to the memory of one process; other state is spread like its parameter.
        self._spread_names = [name for name, role in roles.items() if role is not Role.BLOCK_SCALES]
        needed = [*self._spread_names, KEY] if has_steps else self._spread_names
        for candidate, state in zip(candidates, self._held):
            check_state_whole(rule, candidate.name, state, needed)
        self._steps = StepCounts(self._held) if has_steps else None
        if self._draws:
            self._check_steps()

    def _make_state(
        self,
        candidates: Sequence[Candidate],
        roles: Mapping[str, Role],
        targets: Sequence[Tensor],
    ) -> list[State]:
        """The state as kernels take it, which later steps compare with; what is missing is made."""
        made: list[State] = [
            state_tensors(self._rule, candidate.name, roles, state, target)
            for candidate, state, target in zip(candidates, self._held, targets)
        ]
        self._uncommitted: list[State] | None = made
        watched = [*self._spread_names, *(name for name in roles if name not in self._spread_names)]
        for run, states in zip(self._runs, self._by_run(made)):
            run.watch(states, watched, len(self._spread_names))
        return made

    def _lay_out(self, built: Sequence[Kernel], targets: Sequence[Tensor]) -> None:
        """Make the pipeline, whose numbers and addresses are not written yet."""
        param = self.params[0]
        dtype = PARAM_DTYPES[param.dtype]
        self._arithmetic = dtype.arithmetic
        self._width = param.element_size() // dtype.components
        numels = [dtype.components * target.numel() for target in targets]
        self._chunks = Chunks(numels, built[0].shape.chunk)
        self.is_joint = is_divided(self.spread) and any(map(_uses_sums, built))
        """Whether the update needs norms of whole parameters that are divided among processes."""
        self.pipeline = Pipeline(built, self._chunks, self._device, self.is_joint)
        self._read_gradients = [self.pipeline]
        """The pipelines that read the gradients."""
        self._norm: Pipeline | None = None
        self._written: list[list[int]] = []
        """The gradients' addresses that the launch blocks hold; empty if unknown."""
        self._settings: Settings | None = None
        """What the head was written for, if it holds for more than a step."""

    def _write_addresses(
        self, targets: Sequence[Tensor], roles: Mapping[str, Role], states: Sequence[State]
    ) -> None:
        pipeline = self.pipeline
        pipeline.write_addresses("param", list(map(Tensor.data_ptr, targets)), self._width)
        pipeline.write_addresses("grad", self._all_grad_addresses(), self._width)
        for name, role in roles.items():
            addresses = [state[name].data_ptr() for state in states]
            if role is Role.BLOCK_SCALES:
                pipeline.write_addresses(name, addresses, SCALES.itemsize, BLOCK)
            else:
                pipeline.write_addresses(name, addresses, state_width(role, self.params[0]))

    def _write_integers(self, numbers: Sequence[str]) -> None:
        for flag in self._row_flags:
            self.pipeline.write_integers(flag, self.fresh or ())
        for name in numbers:
            number_of = self._rule.param_numbers()
            self.pipeline.write_integers(name, [number_of[p] for p in self.params])

    def _count_writes_meanwhile(self) -> None:
        """Let the launch count the writes, if they are many and it can."""
        count_writes = functools.partial(increment_version, self.written)
        if len(self.written) >= _MANY_WRITTEN and self.pipeline.while_running(count_writes):
            self.written = []

    def _check_steps(self) -> None:
        if self._steps is not None:
            self._steps.check_next_differs(self._rule.optimizer_name)

    def _by_run(self, states: Sequence[State]) -> Iterator[Sequence[State]]:
        return (states[i : i + RUN] for i in range(0, len(states), RUN))

    def _all_grad_addresses(self) -> list[int]:
        return list(itertools.chain.from_iterable(map(_grad_addresses, self._runs)))

    def refresh(self) -> bool:
        """See :class:`fusedoptim.step.rows.Rows`."""
        if self._uncommitted is not None:  # its launch never happened
            return False
        if not self.runs_on_host and self._backend.queue(self._device) is not self._queue:
            return False  # torch's current stream has changed
        if self._steps is not None and not self._steps.are_held_by(self._held):
            return False
        if self._draws:
            self._check_steps()
        for run in self._runs:
            if not run.refresh():
                return False
        by_run = list(map(_grad_addresses, self._runs))
        if by_run != self._written:
            self._written = []
            addresses = list(itertools.chain.from_iterable(by_run))
            for pipeline in self._read_gradients:
                pipeline.write_addresses("grad", addresses, self._width)
            self._written = by_run
        return True

    def sum_of_squares(self) -> Tensor:
        """See :class:`fusedoptim.step.rows.Rows`."""
        norm = self._norm
        if norm is None:
            kernel = kernel_for(self._queue, "sum_of_squares", self._variant)
            norm = Pipeline([kernel], self._chunks, self._device)
            norm.write_addresses("grad", self._all_grad_addresses(), self._width)
            self._written = []  # so that the next step writes its addresses to this one too
            self._read_gradients.append(norm)
            self._norm = norm
        return norm.launch_and_sum()

    def prepare(self, settings: Settings, common: Tensor | None) -> Sequence[Stage]:
        """See :class:`fusedoptim.step.rows.Rows`."""
        pipeline = self.pipeline
        for param, target in self._copied:
            target.copy_(param.detach())
        if self._steps is not None:
            pipeline.write_scalars(self._rule.row_numbers(settings.numbers, self._steps.next()))
        if settings is not self._settings or common is not None:
            self._settings = None
            factor = grad_factor(settings.sign, common, self._arithmetic, self._device)
            pipeline.write_head({**settings.numbers, "grad_factor": factor.data_ptr()})
            self._grad_factor = factor  # kept until the launch has ended
            self._settings = settings if common is None else None
        return pipeline.stages

    def commit(self, states: MutableMapping[Tensor, State]) -> None:
        """See :class:`fusedoptim.step.rows.Rows`."""
        if self._steps is not None:
            self._steps.count_up()
        if self._uncommitted is not None:
            self._add_state(states, self._uncommitted)
        for param, target in self._copied:
            param.detach().copy_(target)
        for run in self._runs:  # as release() does, without a call in each step
            run.held = []

    def release(self) -> None:
        """See :class:`fusedoptim.step.rows.Rows`."""
        for run in self._runs:
            run.held = []

    def _add_state(self, states: MutableMapping[Tensor, State], made: list[State]) -> None:
        if self._steps is not None:
            for state, count in zip(made, self._steps.views):
                state[KEY] = count
        if any(made):  # the optimizer's state must not get empty entries
            for p, state in zip(self.params, made):
                target = states[p]
                spread = self._spread_names if self.spread is not None else []
                target.update(
                    state | {name: like_param(state[name], p, target.get(name)) for name in spread}
                )
            self._held = [states[p] for p in self.params]
            for run, held in zip(self._runs, self._by_run(self._held)):
                run.states = held
        if any(self.fresh or ()):
            for flag in self._row_flags:
                self.pipeline.write_integers(flag, [False] * len(self.params))
        self._uncommitted = None
