"""An optimizer with torch's schedulers, averaged models, hooks and compiled models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from tests.fusedoptim.helpers import SideBySide, each_case, each_class, make_params, single, widened
from tests.optimizer_cases import OptimizerCase

LAYOUTS = ("1000", "0-d")
pytestmark = pytest.mark.usefixtures("one_thread")


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2)
    )


def _dtype(model: torch.nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def _backward(model: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model(x).square().mean().backward()


def _batches(model: torch.nn.Module, count: int = 4) -> list[Tensor]:
    return [torch.randn(5, 6).to(_dtype(model)) for _ in range(count)]


def _twin_models(case: OptimizerCase, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """Two equal models and their optimizers."""
    first = _model()
    second = copy.deepcopy(first)
    optimizers = [case.make(model.parameters(), **kwargs) for model in (first, second)]
    return first, second, *optimizers


def _train(x: Tensor, *pairs: tuple[torch.nn.Module, Any]) -> None:
    """Step each model's optimizer with the gradients of one batch."""
    for model, optimizer in pairs:
        optimizer.zero_grad()
        _backward(model, x)
        optimizer.step()


def _assert_same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters()):
        assert torch.equal(p, q)


def _plateau(optimizer: Any) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def _sequence(optimizer: Any) -> Any:
    warm_up = lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[2])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=5),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i)),
    "plateau": _plateau,
    "sequence": _sequence,
    "swa": lambda optimizer: SWALR(optimizer, swa_lr=0.01, anneal_epochs=3),
}


class TestSchedulers:
    """The next step uses the learning rate, and whatever else a scheduler changes."""

    @staticmethod
    def _run(pair: SideBySide, schedulers: list[Any]) -> None:
        for i in range(5):
            pair.train()
            for scheduler in schedulers:
                if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(float(i))
                else:
                    scheduler.step()

    @pytest.mark.parametrize("steps_before", [0, 2])
    @pytest.mark.parametrize("name", SCHEDULERS)
    @each_class
    def test_kinds(self, case: OptimizerCase, name: str, steps_before: int) -> None:
        pair = SideBySide(case, case.kwargs[-1] | {"lr": 0.1}, make_params(torch.float32, LAYOUTS))
        pair.train(steps_before)
        schedulers = [SCHEDULERS[name](optimizer) for optimizer in (pair.ours, pair.torchs)]
        self._run(pair, schedulers)
        rates = [optimizer.param_groups[0]["lr"] for optimizer in (pair.ours, pair.torchs)]
        assert rates[0] == rates[1] != 0.1

    @each_case
    def test_rate_that_is_a_tensor(self, case: OptimizerCase) -> None:
        """A scheduler writes into the tensor or replaces it."""
        pair = SideBySide(case, {"lr": 0.1}, make_params(torch.float32, LAYOUTS))
        for optimizer in (pair.ours, pair.torchs):
            optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.float64)
        self._run(pair, [_sequence(optimizer) for optimizer in (pair.ours, pair.torchs)])

    @each_case
    def test_momentum_and_betas_too(self, case: OptimizerCase) -> None:
        pair = SideBySide(case, case.kwargs[-1] | {"lr": 0.1}, make_params(torch.float32, LAYOUTS))
        has_either = bool({"momentum", "betas"} & set(pair.ours.defaults))
        schedulers = [
            lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=6, cycle_momentum=has_either)
            for optimizer in (pair.ours, pair.torchs)
        ]
        self._run(pair, schedulers)

    @each_case
    def test_rate_of_zero(self, case: OptimizerCase) -> None:
        _, optimizer = single(case, "1000", lr=0.1)
        scheduler = lr_scheduler.LambdaLR(optimizer, lambda i: 0.0)
        (before,) = optimizer.master_params()
        optimizer.step()
        scheduler.step()
        (after,) = optimizer.master_params()
        assert torch.equal(after, before)

    @each_case
    def test_checkpoint_with_the_scheduler(self, case: OptimizerCase) -> None:
        first, second, ours, twin = _twin_models(case, **(case.kwargs[-1] | {"lr": 0.1}))
        scheduler, copied = (_sequence(optimizer) for optimizer in (ours, twin))
        for i, x in enumerate(_batches(first, 6)):
            _train(x, (first, ours), (second, twin))
            scheduler.step()
            copied.step()
            if i == 2:
                saved = copy.deepcopy((twin.state_dict(), copied.state_dict()))
                twin = case.make(second.parameters(), **(case.kwargs[-1] | {"lr": 0.1}))
                copied = _sequence(twin)
                twin.load_state_dict(saved[0])
                copied.load_state_dict(saved[1])
        _assert_same_parameters(first, second)


class TestAveragedModel:
    """torch.optim.swa_utils: the average follows the parameters that a step writes."""

    @pytest.mark.parametrize("kind", ["mean", "exponential"])
    @each_case
    def test_average(self, case: OptimizerCase, kind: str) -> None:
        """The average equals that of a model with these parameters that no kernel has touched."""
        model = _model()
        optimizer = case.make(model.parameters(), lr=0.05)
        plain = copy.deepcopy(model)
        multi_avg_fn = get_ema_multi_avg_fn(0.8) if kind == "exponential" else None
        averages = [AveragedModel(m, multi_avg_fn=multi_avg_fn) for m in (model, plain)]
        seen = []
        for x in _batches(model):
            _train(x, (model, optimizer))
            seen.append([p.detach().clone() for p in model.parameters()])
            for p, value in zip(plain.parameters(), seen[-1]):
                p.data.copy_(value)
            averages[0].update_parameters(model)
            averages[1].update_parameters(plain)
        _assert_same_parameters(*averages)
        assert not torch.equal(next(averages[0].parameters()), next(model.parameters()))
        for p, value in zip(model.parameters(), seen[-1]):
            assert torch.equal(p, value)

    @each_case
    def test_training_goes_on_from_the_average(self, case: OptimizerCase) -> None:
        """A step reads the parameters that were written since the last one."""
        pair = SideBySide(case, {"lr": 0.05}, make_params(torch.float32, LAYOUTS))
        pair.train()
        for p, reference in zip(pair.params, pair.references):
            pair.ours.state.get(p, {}).get("trail", torch.empty(0)).zero_()
            p.data.copy_(torch.randn(p.shape))
            reference.data.copy_(widened(p))
        for errors in pair._errors.values():
            errors["param"] = torch.zeros(())
        pair.train()


@each_case
def test_a_step_for_each_parameter_in_backward(case: OptimizerCase) -> None:
    """Each parameter has an optimizer, stepped by a hook, which then frees the gradient."""
    first, second, together, _ = _twin_models(case, **case.kwargs[-1])
    second = copy.deepcopy(second)
    alone = {p: case.make([p], **case.kwargs[-1]) for p in second.parameters()}

    def update(p: Tensor) -> None:
        alone[p].step()
        alone[p].zero_grad()

    for p in second.parameters():
        p.register_post_accumulate_grad_hook(update)
    if case.is_split:  # lower halves of the first model's values
        for p, master in zip(second.parameters(), together.master_params()):
            alone[p].halves.trail(p).copy_(master.view(torch.int32))
    for x in _batches(first):
        _train(x, (first, together))
        _backward(second, x)
        assert all(p.grad is None for p in second.parameters())
    _assert_same_parameters(first, second)


class TestGroups:
    @each_case
    def test_named_parameters_in_groups(self, case: OptimizerCase) -> None:
        first, second, _, _ = _twin_models(case)
        first, second = copy.deepcopy(first).float(), copy.deepcopy(second).float()
        named = list(first.named_parameters())
        params = list(second.parameters())
        optimizers = [
            case.make([{"params": values[:2], "lr": 0.2}, {"params": values[2:]}], lr=0.05)
            for values in (named, params)
        ]
        names = [name for name, _ in named]
        groups = optimizers[0].param_groups
        assert [group["param_names"] for group in groups] == [names[:2], names[2:]]
        for i, x in enumerate(_batches(first)):
            _train(x, *zip((first, second), optimizers))
            if i == 1:
                saved = copy.deepcopy(optimizers[0].state_dict())
                assert saved["param_groups"][1]["param_names"] == names[2:]
                optimizers[0].load_state_dict(saved)
        _assert_same_parameters(first, second)

    @each_case
    def test_an_error_has_the_name(self, case: OptimizerCase) -> None:
        model = _model()
        optimizer = case.make(model.named_parameters(), lr=0.1)
        names = [name for name, _ in model.named_parameters()]
        assert optimizer.param_groups[0]["param_names"] == names
        model[3].weight.grad = torch.ones_like(model[3].weight)
        model[3].weight.data = model[3].weight.data.t()
        with pytest.raises(RuntimeError, match=r"3\.weight"):
            optimizer.step()


@pytest.mark.parametrize("steps", [0, 2])
@each_case
def test_checkpoint_with_a_frozen_layer(case: OptimizerCase, steps: int) -> None:
    """A parameter without a step has no state, or its lower half alone."""
    first, second, ours, twin = _twin_models(case, **case.kwargs[-1])
    for model in (first, second):
        model[0].requires_grad_(False)
    for i, x in enumerate(_batches(first)):
        if i == steps:
            saved = copy.deepcopy(twin.state_dict())
            twin = case.make(second.parameters(), **case.kwargs[-1])
            twin.load_state_dict(saved)
        _train(x, (first, ours), (second, twin))
    _assert_same_parameters(first, second)


class TestHooks:
    """Hooks may change what a step, a save or a load sees."""

    @each_case
    def test_step_hooks_that_write(self, case: OptimizerCase) -> None:
        """Hooks write gradients before the step, and the learning rate after it."""
        pair = SideBySide(case, {"lr": 0.1}, make_params(torch.float32, ["1000", "17"]))

        def halve(optimizer: Any, *_: Any) -> None:
            for p in optimizer.param_groups[0]["params"]:
                p.grad = p.grad / 2

        def double(optimizer: Any, *_: Any) -> None:
            optimizer.param_groups[0]["lr"] *= 2

        pair.ours.register_step_pre_hook(halve)
        for optimizer in (pair.ours, pair.torchs):
            optimizer.register_step_post_hook(double)
        for _ in range(3):
            pair.set_gradients()
            for reference in pair.references:
                reference.grad.div_(2)
            pair.check()
        assert pair.ours.param_groups[0]["lr"] == 0.8

    @each_case
    def test_state_dict_hooks(self, case: OptimizerCase) -> None:
        p, optimizer = single(case)
        optimizer.step()
        rate = float(optimizer.param_groups[0]["lr"])
        seen: list[str] = []

        def add(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            seen.append("saved")
            return {**saved, "epoch": 3}

        def take(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
            seen.append("loading")
            assert saved["epoch"] == 3
            return {key: value for key, value in saved.items() if key != "epoch"}

        def halve(_: Any, saved: dict[str, Any]) -> None:
            saved["param_groups"][0]["lr"] = rate / 2

        def check(loaded: Any) -> None:
            seen.append("loaded")
            assert set(loaded.state[p]) == set(case.state_keys)

        optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
        optimizer.register_state_dict_post_hook(add)
        optimizer.register_load_state_dict_pre_hook(take)
        optimizer.register_load_state_dict_pre_hook(halve)
        optimizer.register_load_state_dict_post_hook(check)
        before = copy.deepcopy(optimizer.state[p])
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen == ["saving", "saved", "loading", "loaded"]
        assert optimizer.param_groups[0]["lr"] == rate / 2
        for key, value in before.items():
            assert torch.equal(optimizer.state[p][key], value)


class TestCompiledModel:
    @each_case
    def test_trains_as_in_eager_mode(self, case: OptimizerCase) -> None:
        """The graph is compiled once and sees each update."""
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = _model()
        pair = SideBySide(case, params=list(model.parameters()))
        compiled = torch.compile(model, backend="aot_eager")
        for x in _batches(model, 5):
            pair.ours.zero_grad()
            _backward(compiled, x)
            for p, reference in zip(pair.params, pair.references):
                reference.grad = widened(p.grad)
            with torch.no_grad():
                assert torch.equal(compiled(x), model(x))
            pair.check()
        assert not torch._dynamo.utils.counters["graph_break"]
