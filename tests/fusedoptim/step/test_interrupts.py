"""A KeyboardInterrupt at each place where CPython looks for signals: all or nothing is done."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fusedoptim.sgd
from fusedoptim import FusedAdam, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.launch.block import LaunchBlock
from fusedoptim.split.halves import Halves
from fusedoptim.split.pages import has_sole_owner
from tests.conftest import SEED
from tests.fusedoptim.helpers import params_of
from tests.interrupts import InterruptAt, polls_of
from tests.optimizer_cases import (
    ADAM,
    ADAMW,
    CASES,
    LAMB,
    SGD,
    SPLIT_SGD,
    OptimizerCase,
    configuration_id,
)


def interrupts(
    call: Callable[[], object], since: str, within: ModuleType = fusedoptim
) -> Iterator[InterruptAt]:
    """Interrupts at each place of a call from the start of a function on.

    The call is made once without an interrupt. Each interrupt is for the same call on objects like
    those before it, so it takes the same path.
    """
    for place in polls_of(call, within=within, since=since):
        interrupt = InterruptAt(place, "polls", within=within, since=since)
        yield interrupt
        assert interrupt.has_raised, f"another path was taken before {place}"


@functools.cache
def numbers(*shape: int, seed: int) -> Tensor:
    """Random numbers that are the same at each call within one run of the tests."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED + seed))


def new_params(numel: int = 7) -> list[Parameter]:
    """Parameters that are the same at each call."""
    matrix = numbers(3, 4, seed=101).clone()
    return [Parameter(numbers(numel, seed=100).clone()), Parameter(matrix[:, ::2])]


def make_gradients(params: list[Parameter], which: int) -> None:
    """The gradients of one of the steps: the same at each call."""
    for i, p in enumerate(params):
        p.grad = numbers(*p.shape, seed=10 * which + i).to(p.dtype, copy=True)


def everything(optimizer: Any) -> list[dict[str, Tensor]]:
    """A copy of each parameter and its state."""
    params = params_of(optimizer)
    return [
        {"param": p.detach().clone(), **{k: v.clone() for k, v in optimizer.state[p].items()}}
        for p in params
    ]


def is_same(some: list[dict[str, Tensor]], others: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
        for a, b in zip(some, others)
    )


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case is not ADAMW], ids=configuration_id
)
def test_step_is_taken_or_not(
    case: OptimizerCase, steps_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step agrees on whether the step was taken. AdamW has Adam's code."""
    new_state = fusedoptim.sgd.new_state
    # New memory holds arbitrary values.
    monkeypatch.setattr(
        fusedoptim.sgd, "new_state", lambda *arguments: new_state(*arguments).fill_(777)
    )

    def run(seeds: list[int]) -> Any:
        params = new_params()
        optimizer = case.make(params, **case.kwargs[-1])
        for seed in seeds:
            make_gradients(params, seed)
            optimizer.step()
        return optimizer

    before = list(range(1, steps_before + 1))
    expected = {
        is_taken: [everything(run(seeds)), everything(run([*seeds, 9]))]
        for is_taken, seeds in ((False, before), (True, [*before, 8]))
    }

    def ready() -> Any:
        optimizer = run(before)
        make_gradients(params_of(optimizer), 8)
        return optimizer

    outcomes = []
    for interrupted in interrupts(ready().step, "_update"):
        optimizer = ready()
        params = params_of(optimizer)
        with interrupted:
            optimizer.step()
        now = everything(optimizer)
        make_gradients(params, 9)
        optimizer.step()
        result = [now, everything(optimizer)]
        (is_taken,) = [
            key for key, states in expected.items() if all(map(is_same, result, states))
        ] or [None]
        place = len(outcomes)
        assert is_taken is not None, f"the interrupt at place {place} left a step half taken"
        outcomes.append(is_taken)
    assert len(outcomes) > 40
    assert set(outcomes) == {False, True}


@pytest.mark.parametrize("case", [SGD, LAMB], ids=configuration_id)
def test_a_later_step_takes_over_nothing_of_an_interrupted_one(case: OptimizerCase) -> None:
    """The later step has the first one's gradients and rate, unlike the interrupted one."""

    def ready() -> tuple[Any, Callable[[], list[dict[str, Tensor]]]]:
        """An optimizer before the interrupted step, and what takes the later step."""
        params = new_params()
        optimizer = case.make(params, **case.kwargs[-1])
        make_gradients(params, 1)
        first = [p.grad for p in params]
        make_gradients(params, 2)
        second = [p.grad for p in params]

        def prepare(grads: Any, rate: float, limit: float | None) -> None:
            optimizer.max_grad_norm, optimizer.param_groups[0]["lr"] = limit, rate
            for p, grad in zip(params, grads):
                p.grad = grad

        def take_later_step() -> list[dict[str, Tensor]]:
            prepare(first, 0.1, 1.0)
            optimizer.step()
            return everything(optimizer)

        prepare(first, 0.1, None)
        optimizer.step()
        prepare(second, 0.5, 1.0)
        return optimizer, take_later_step

    _, take_later_step = ready()
    expected = [take_later_step()]
    optimizer, take_later_step = ready()
    optimizer.step()
    expected.append(take_later_step())
    places = 0
    for interrupted in interrupts(ready()[0].step, "_update"):
        optimizer, take_later_step = ready()
        with interrupted:
            optimizer.step()
        result = take_later_step()
        assert any(is_same(result, states) for states in expected), f"wrong after place {places}"
        places += 1
    assert places > 80


@pytest.mark.parametrize("case", [ADAM, LAMB, SPLIT_SGD], ids=configuration_id)
def test_checkpoint_is_loaded_or_not(case: OptimizerCase) -> None:
    def new(seed: int) -> Any:
        params = [Parameter(p.detach().bfloat16()) for p in new_params()]
        optimizer = case.make(params, **case.kwargs[-1])
        make_gradients(params, seed)
        optimizer.step()
        return optimizer

    checkpoint = new(2).state_dict()
    for group in checkpoint["param_groups"]:
        group.pop("always_adapt", None)  # timm's Lamb has it, and others do not
    old, loaded = new(1), new(1)
    loaded.load_state_dict(checkpoint)
    expected = [everything(old), everything(loaded)]
    outcomes = set()
    load = functools.partial(new(1).load_state_dict, checkpoint)
    for interrupted in interrupts(load, "load_state_dict"):
        optimizer = new(1)
        with interrupted:
            optimizer.load_state_dict(checkpoint)
        result = everything(optimizer)
        (which,) = [i for i, states in enumerate(expected) if is_same(result, states)]
        outcomes.add(which)
        make_gradients(params_of(optimizer), 3)
        optimizer.step()
    assert outcomes == {0, 1}


@pytest.mark.parametrize("optimizer_class", [FusedSGD, FusedAdam])
def test_first_checkpoint_of_split_parameters_is_loaded_or_not(optimizer_class: Any) -> None:
    """Before the first step, after the upper halves were loaded: no trail of old values stays."""

    def new(seed: int) -> Any:
        values = numbers(7, seed=seed), numbers(3, 2, seed=seed + 1)
        return optimizer_class([Parameter(value.clone()) for value in values], 0.1, split=True)

    source = new(110)
    make_gradients(params_of(source), 1)
    source.step()
    checkpoint, uppers = source.state_dict(), [p.detach().clone() for p in params_of(source)]

    def ready() -> Any:
        optimizer = new(120)
        for p, upper in zip(params_of(optimizer), uppers):
            p.data.copy_(upper)
        return optimizer

    def results(optimizer: Any) -> list[list[dict[str, Tensor]]]:
        make_gradients(params_of(optimizer), 2)
        exact = [{"exact": values} for values in optimizer.master_params()]
        optimizer.step()
        return [exact, everything(optimizer)]

    loaded = ready()
    loaded.load_state_dict(checkpoint)
    expected = [results(ready()), results(loaded)]
    outcomes = set()
    load = functools.partial(ready().load_state_dict, checkpoint)
    for interrupted in interrupts(load, "load_state_dict"):
        optimizer = ready()
        with interrupted:
            optimizer.load_state_dict(checkpoint)
        found = results(optimizer)
        (which,) = [i for i, states in enumerate(expected) if all(map(is_same, found, states))]
        outcomes.add(which)
    assert outcomes == {0, 1}


@pytest.mark.parametrize(
    ("start", "module"),
    [
        ("load_state_dict", fusedoptim),
        ("state_dict", fusedoptim),
        ("__init__", torch.utils.hooks),
    ],
    ids=["load_state_dict", "state_dict", "RemovableHandle"],
)
def test_hooks_that_an_interrupt_kept_do_nothing(start: str, module: ModuleType) -> None:
    """A checkpoint is loaded and saved after another load or save was interrupted."""

    def new(seed: int) -> FusedSGD:
        values = numbers(7, seed=seed), numbers(3, 2, seed=seed + 1)
        params = [Parameter(value.clone()) for value in values]
        optimizer = FusedSGD(params, 0.1, momentum=0.9, split=True)
        make_gradients(params, seed)
        optimizer.step()
        return optimizer

    first, second = (new(seed).state_dict() for seed in (1, 2))

    def load_and_save(optimizer: FusedSGD, state_dict: dict[str, Any]) -> dict[str, Any]:
        optimizer.load_state_dict(state_dict)
        return optimizer.state_dict()

    for interrupted in interrupts(functools.partial(load_and_save, new(3), first), start, module):
        optimizer = new(3)
        with interrupted:
            load_and_save(optimizer, first)
        saved = load_and_save(optimizer, second)
        states = [list(state_dict["state"].values()) for state_dict in (saved, second)]
        assert is_same(*states), "another state was saved than was loaded"


def _params(numel: int = 7) -> list[Parameter]:
    params = new_params(numel)
    make_gradients(params, 1)
    return params


def _constructor() -> tuple[list[Parameter], Any, Callable[[], Any]]:
    params = _params()
    return params, None, lambda: FusedAdam(params, split=True)


def _add_param_group() -> tuple[list[Parameter], Any, Callable[[], Any]]:
    params = _params()
    optimizer = SplitSGD([Parameter(torch.zeros(1))], lr=0.1)
    return params, optimizer, lambda: optimizer.add_param_group({"params": params})


def _split_params() -> tuple[list[Parameter], Any, Callable[[], Any]]:
    params = _params(300_000)
    assert has_sole_owner(params[0])  # so its memory is released
    optimizer = FusedSGD(params, lr=0.1)
    return params, optimizer, lambda: optimizer.split_params(params)


def _merge_params() -> tuple[list[Parameter], Any, Callable[[], Any]]:
    params = _params()
    optimizer = FusedSGD(params, lr=0.1)
    optimizer.split_params(params)
    return params, optimizer, lambda: optimizer.merge_params(params)


def _exact(params: list[Parameter], halves: Halves | None) -> list[Tensor]:
    """The exact float32 values; exactly the parameters in ``halves`` have to be bfloat16."""
    assert all((p.dtype == torch.bfloat16) == (halves is not None and p in halves) for p in params)
    return [
        p.detach().clone() if halves is None or p not in halves else halves.exact(p) for p in params
    ]


@pytest.mark.parametrize("new", [_constructor, _add_param_group, _split_params, _merge_params])
def test_parameters_are_converted_or_not(
    new: Callable[[], tuple[list[Parameter], Any, Callable[[], Any]]],
) -> None:
    """All parameters are converted or none, and none loses a bit or its gradient."""
    since = "__init__" if new is _constructor else new.__name__[1:]
    whole: Any = contextlib.nullcontext()
    n = 0
    for n, interrupted in enumerate(itertools.chain([whole], interrupts(new()[2], since))):
        params, optimizer, convert = new()
        halves = None if optimizer is None else optimizer.halves
        values, dtype = _exact(params, halves), params[0].dtype
        groups = 0 if optimizer is None else len(optimizer.param_groups)
        with interrupted:
            halves = (convert() or optimizer).halves
        assert len({p.dtype for p in params}) == 1
        assert all(map(torch.equal, _exact(params, halves), values)), f"lost at place {n - 1}"
        assert all(p.grad is not None and p.grad.dtype == p.dtype for p in params)
        if interrupted is whole:
            continue
        if optimizer is not None and params[0].dtype == dtype:
            assert len(optimizer.param_groups) == groups
            convert()
            assert params[0].dtype != dtype
        if optimizer is not None:
            optimizer.step()
    assert n > 60


class OddParameter(Parameter):
    """A parameter whose gradient is None at the second read, as if a thread had removed it."""

    @property
    def grad(self) -> Any:
        grad = Tensor.grad.__get__(self)
        if self.is_removed:
            Tensor.grad.__set__(self, None)
        return grad

    @grad.setter
    def grad(self, value: Any) -> None:
        Tensor.grad.__set__(self, value)


def test_gradient_that_another_thread_removes() -> None:
    params = [OddParameter(torch.zeros(3)) for _ in range(2)]
    optimizer = FusedSGD(params, lr=1.0)
    for steps in range(1, 4):
        for p in params:
            p.grad = torch.ones(3)
            p.is_removed = p is params[1] and steps == 1
        optimizer.step()
        assert params[0].tolist() == [-steps] * 3
        assert params[1].tolist() in ([-steps] * 3, [1.0 - steps] * 3)


def test_no_memory_for_one_of_several_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch raises a RuntimeError if memory runs out, and no parameter is split."""
    split = Halves.split
    params = [Parameter(torch.randn(5)) for _ in range(3)]
    values = [p.detach().clone() for p in params]

    def fails_at_last(halves: Halves, param: Tensor) -> None:
        if param is params[-1]:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        split(halves, param)

    monkeypatch.setattr(Halves, "split", fails_at_last)
    with pytest.raises(RuntimeError, match="can't allocate"):
        FusedAdam(params, split=True)
    assert all(torch.equal(p, value) for p, value in zip(params, values))
    optimizer = SplitSGD([Parameter(torch.randn(5))], lr=0.1)
    with pytest.raises(RuntimeError, match="can't allocate"):
        optimizer.add_param_group({"params": params})
    assert all(torch.equal(p, value) for p, value in zip(params, values))
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("optimizer_class", [FusedSGD, FusedAdam, FusedLamb])
def test_step_in_the_middle_of_a_step(
    optimizer_class: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler may call step: the call is refused, and the running step completes."""
    p, other = Parameter(torch.ones(100)), Parameter(torch.ones(100))
    optimizer, alone = optimizer_class([p], lr=0.1), optimizer_class([other], lr=0.1)
    launch, refusals = LaunchBlock.launch, []

    def launch_and_step(block: LaunchBlock, *arguments: Any) -> None:
        launch(block, *arguments)
        monkeypatch.setattr(LaunchBlock, "launch", launch)
        with pytest.raises(
            RuntimeError, match="in the middle of a step or a load of the same"
        ) as refusal:
            optimizer.step()
        refusals.append(refusal)

    for _ in range(3):
        p.grad = other.grad = torch.randn(100)
        alone.step()
        monkeypatch.setattr(LaunchBlock, "launch", launch_and_step)
        optimizer.step()
        assert torch.equal(p, other)
    assert len(refusals) == 3
