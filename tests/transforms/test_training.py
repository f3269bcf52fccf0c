"""optimize(model, optimizer): whole trainings, checkpoints, undoing, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, StepLR
from torch.optim.swa_utils import AveragedModel

from fusedoptim import FusedSGD, transforms
from tests.fusedoptim.helpers import SideBySide, widened
from tests.optimizer_cases import OptimizerCase
from tests.transforms.helpers import (
    RATES,
    assert_same,
    each_class,
    fingerprint,
    randomise,
    saved,
    task_and_kwargs,
    train,
    without_addresses,
)
from tests.transforms.models import TASKS, Task, small

STEPS = 20
SEED = 0
each_task = pytest.mark.parametrize("task", TASKS)
each_dtype = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
FUSE_STEP, SPLIT = "fuse_update_step", "split_master_weight_for_bf16"
BY_DEFAULT = (
    *("parallel_dropout", "fuse_gelu", "fuse_frozen_batch_norm", "onednn_products"),
    "auto_channels_last",
)


def _loss(model: nn.Module, task: Task, generator: torch.Generator, dtype: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
        return task.loss(model, generator)


def _train(
    model: nn.Module,
    optimizer: Any,
    task: Task,
    dtype: torch.dtype | None = None,
    steps: int = 2,
    seed: int = SEED,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model, task, generator, dtype).backward()
        optimizer.step()


def _pair(case: OptimizerCase, task: str) -> tuple[nn.Module, Any, Task]:
    """A model in training, and its optimizer, which has state."""
    chosen, kwargs = task_and_kwargs(task, case)
    torch.manual_seed(SEED)
    model = chosen.make()
    optimizer = case.reference(model.parameters(), **kwargs)
    _train(model, optimizer, chosen)
    return model, optimizer, chosen


def _facts(model: nn.Module, optimizer: Any) -> list[Any]:
    """All that a call must leave alone that fails, or was about a copy."""
    state = [
        (id(p), k, id(v), copy.deepcopy(v) if isinstance(v, Tensor) else v)
        for p, state in optimizer.state.items()
        for k, v in state.items()
    ]
    groups = [
        (id(group), {k: list(map(id, v)) if k == "params" else v for k, v in group.items()})
        for group in optimizer.param_groups
    ]
    grads = [copy.deepcopy(p.grad) for p in model.parameters()]
    own = (id(optimizer), type(optimizer), sorted(vars(optimizer)))
    return [fingerprint(model), own, groups, state, grads]


def _small(cls: Any = torch.optim.SGD, **kwargs: Any) -> tuple[nn.Sequential, Any]:
    model = small()
    return model, cls(model.parameters(), lr=0.1, **kwargs)


class TestSteps:
    """Against torch in float64."""

    @each_task
    @each_class
    @each_dtype
    @pytest.mark.parametrize("is_last", [False, True], ids=["as it was", "channels_last"])
    def test_each_of_20(
        self, case: OptimizerCase, task: str, dtype: torch.dtype | None, is_last: bool
    ) -> None:
        """With the model's own gradients."""
        if is_last and task not in ("cnn", "resnet", "gan"):
            pytest.skip("has no convolutions")
        chosen, kwargs = task_and_kwargs(task, case)
        torch.manual_seed(SEED)
        model = chosen.make()

        def optimized(params: Any, **kwargs: Any) -> Any:
            optimizer = case.reference(params, **kwargs)
            pair = transforms.optimize(
                model, optimizer, dtype=dtype, inplace=True, auto_channels_last=is_last
            )
            assert pair == (model, optimizer)
            return optimizer

        plain = [p.detach().clone() for p in model.parameters()]
        ours = dataclasses.replace(case, cls=optimized)
        pair = SideBySide(ours, kwargs, list(model.parameters()))
        for reference, value in zip(pair.references, plain):
            assert torch.equal(reference, value.double())
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(STEPS):
            pair.ours.zero_grad()
            _loss(model, chosen, generator, dtype).backward()
            for p, reference in zip(pair.params, pair.references):
                if p.grad is not None:
                    if p.grad.is_sparse:
                        p.grad = p.grad.coalesce()
                    reference.grad = widened(p.grad).to_dense()
            pair.step()
            pair.assert_equal()

    @each_task
    @each_class
    # torch's Adagrad, of its own sparse tensors
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_ends_as_near_to_float64_as_torch_does(self, case: OptimizerCase, task: str) -> None:
        """With a scheduler that was made before, if that can be, and one that is made later."""
        chosen, kwargs = task_and_kwargs(task, case)
        torch.manual_seed(SEED)
        start = chosen.make()

        def trained(model: nn.Module, how: str = "") -> nn.Module:
            optimizer: Any = case.reference(model.parameters(), **kwargs)
            schedulers: list[Any] = [StepLR(optimizer, 5, gamma=0.5)]
            if how in ("copy", "in place"):
                model, optimizer = transforms.optimize(model, optimizer, inplace=how == "in place")
                assert optimizer.fused
            if how == "copy":
                schedulers = [StepLR(optimizer, 5, gamma=0.5)]
            generator = torch.Generator().manual_seed(SEED)
            for step in range(STEPS):
                if step == 7 and how == "fused at step 7":
                    transforms.optimize(model, optimizer, inplace=True)
                if step == STEPS // 2:
                    schedulers.append(CosineAnnealingLR(optimizer, T_max=STEPS))
                optimizer.zero_grad()
                chosen.loss(model, generator).backward()
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
            return model

        exact = trained(copy.deepcopy(start).double())
        off = _distance(trained(copy.deepcopy(start)), exact)
        for how in ("copy", "in place", "fused at step 7"):
            ours = trained(copy.deepcopy(start), how)
            assert _distance(ours, start) > 100 * _distance(ours, exact)  # it has moved
            # Roundings of forward and backward, which both have, make most of the error; the
            # factor of 3 is for the step's own, which add up differently in each.
            assert _distance(ours, exact) <= 3 * off, how


def _distance(model: nn.Module, other: nn.Module) -> float:
    """The norm of the difference of all parameters."""
    pairs = zip(model.parameters(), other.parameters())
    return sum((p.double() - q.double()).square().sum().item() for p, q in pairs) ** 0.5


@each_task
@each_class
@each_dtype
# torch's Adagrad, of its own sparse tensors
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_checkpoints_and_undoing(case: OptimizerCase, task: str, dtype: torch.dtype | None) -> None:
    """Checkpoints are those of the plain pair, bit for bit, both ways; and so is what is undone."""
    model, optimizer, chosen = _pair(case, task)
    before = saved(model, optimizer)
    new, its = transforms.optimize(model, optimizer, dtype=dtype)
    assert_same(saved(new, its), before)
    assert_same(saved(model, optimizer), before)
    _train(new, its, chosen, dtype, seed=1)
    states = saved(new, its)
    assert_same(saved(model, optimizer), before)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    assert_same(saved(model, optimizer), states)
    _train(model, optimizer, chosen, seed=2)  # torch's own step takes what ours has made
    states = saved(model, optimizer)
    its.load_state_dict(states[1])  # in either order: test_split_weights.py loads the model first
    new.load_state_dict(states[0])
    assert_same(saved(new, its), states)
    _train(new, its, chosen, dtype, seed=3)
    states = saved(new, its)
    assert transforms.restore(new, its) == (new, its)
    assert_same(saved(new, its), states)
    assert _kinds(new, its) == _kinds(model, optimizer)
    assert all(p.dtype == torch.float32 for p in new.parameters())
    _train(new, its, chosen, seed=4)


def _kinds(model: nn.Module, optimizer: Any) -> list[Any]:
    """Classes, attributes and strides."""
    modules = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
    own = type(optimizer), sorted(vars(optimizer))
    return [modules, own, [p.stride() for p in model.parameters()]]


class TestUndone:
    def test_needs_the_optimizer_that_has_the_halves(self) -> None:
        model, optimizer = transforms.optimize(*_small(), dtype=torch.bfloat16)
        expected = fingerprint(model)
        with pytest.raises(ValueError, match="not in this Sequential"):
            transforms.restore(model, _small()[1])
        other = torch.optim.SGD(model.parameters())
        for wrong in (None, other):
            with pytest.raises(ValueError, match=r"restore\(model, optimizer\) with that"):
                transforms.restore(model, wrong)
        for arguments in ({}, {"dtype": torch.bfloat16}):
            with pytest.raises(ValueError, match=r"restore\(model, optimizer\) with that"):
                transforms.optimize(model, other, inplace=True, **arguments)
        with pytest.raises(ValueError, match=r"restore\(model, optimizer\) with that"):
            transforms.optimize(model.eval(), inplace=True)
        model.train()
        assert fingerprint(model) == expected
        transforms.restore(model, optimizer)

    @pytest.mark.parametrize("way", ["deepcopy", "average", "optimizer dropped"])
    def test_a_model_without_its_optimizer(self, way: str) -> None:
        model, optimizer = transforms.optimize(*_small(), dtype=torch.bfloat16)
        expected = saved(model)
        if way == "deepcopy":
            model = copy.deepcopy(model)
        elif way == "average":
            model = AveragedModel(model).module
        else:
            del optimizer
        its = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match=r"restore\(model\) first"):
            transforms.optimize(model, its, inplace=True)
        with pytest.raises(ValueError, match=r"restore\(model\) first"):
            transforms.optimize(model.eval(), inplace=True)
        optimized = transforms.optimize(model)
        assert_same(saved(optimized), expected)
        assert optimized[4].weight.dtype == torch.float32
        transforms.restore(model)
        assert_same(saved(model), expected)
        assert model[4].weight.dtype == torch.float32
        model.train()
        again = transforms.optimize(model, its, dtype=torch.bfloat16)
        train(*again)

    def test_a_fused_pair_without_its_optimizer(self) -> None:
        model, optimizer = transforms.optimize(*_small())
        transforms.restore(model)
        transforms.restore(model, optimizer)
        assert type(optimizer) is torch.optim.SGD
        with pytest.raises(ValueError, match="has no report"):
            transforms.restore(model, optimizer)


class TestInPlaceAndCopied:
    @each_dtype
    @pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, FusedSGD])
    def test_train_alike(self, cls: Any, dtype: torch.dtype | None) -> None:
        """And the original of a copy is untouched."""
        model, optimizer = _small(cls)
        train(model, optimizer)
        before = _facts(model, optimizer)
        new, its = transforms.optimize(model, optimizer, dtype=dtype)
        assert isinstance(its, cls)
        assert [*map(id, its.param_groups[0]["params"])] == [*map(id, new.parameters())]
        train(new, its, seed=1)
        assert repr(_facts(model, optimizer)) == repr(before)
        assert new is not model
        assert its is not optimizer
        same = transforms.optimize(model, optimizer, dtype=dtype, inplace=True)
        assert same == (model, optimizer)
        train(model, optimizer, seed=1)
        assert_same(saved(new, its), saved(model, optimizer))

    @each_dtype
    @pytest.mark.parametrize("inplace", [False, True])
    def test_twice(self, dtype: torch.dtype | None, inplace: bool) -> None:
        asked = {"dtype": dtype, FUSE_STEP: True, "auto_channels_last": True}
        model, optimizer = transforms.optimize(*_small(momentum=0.9), **asked)
        train(model, optimizer)
        before, report = _facts(model, optimizer), str(transforms.report(model))
        states = saved(model, optimizer)
        again = transforms.optimize(model, optimizer, inplace=inplace, **asked)
        assert (again[0] is model) == inplace
        assert repr(_facts(model, optimizer)) == repr(before)
        assert_same(saved(*again), states)
        assert str(transforms.report(again[0])) == report
        assert type(again[1]) is type(optimizer)
        train(*again, seed=1)
        transforms.restore(*again)
        assert type(again[1]) is torch.optim.SGD

    def test_fused_first_and_split_later(self) -> None:
        model, optimizer = transforms.optimize(*_small(momentum=0.9))
        train(model, optimizer)
        states = saved(model, optimizer)
        transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
        assert model[4].weight.dtype == torch.bfloat16
        assert_same(saved(model, optimizer), states)
        assert len(transforms.report(model).done(FUSE_STEP)) == 1
        transforms.restore(model, optimizer)
        assert_same(saved(model, optimizer), states)

    def test_schedulers_and_hooks(self) -> None:
        """Made before an inplace=True call they are the pair's; of a copy, the original's."""
        model, optimizer = _small()
        seen: list[str] = []
        before = LinearLR(optimizer)
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        model.register_forward_hook(lambda *_: seen.append("forward"))
        new, its = transforms.optimize(model, optimizer)
        assert "step" not in vars(its)  # the scheduler's wrapper
        transforms.optimize(model, optimizer, inplace=True)
        after = StepLR(optimizer, 1)
        train(model, optimizer, steps=1)
        before.step()  # warns if it sees no step, and warnings are errors
        after.step()
        assert seen == ["forward", "step"]
        assert optimizer.param_groups[0]["lr"] != 0.1 / 3
        assert its.param_groups[0]["lr"] == 0.1 / 3
        train(new, its, steps=1)
        assert seen == ["forward", "step"] * 2

    def test_two_optimizers_of_one_model(self) -> None:
        torch.manual_seed(SEED)
        model = TASKS["gan"].make()
        parts: Any = [model.generator, model.critic]
        optimizers = [torch.optim.Adam(part.parameters()) for part in parts]
        states = saved(model)
        for optimizer in optimizers:
            transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
        assert_same(saved(model), states)
        assert parts[0][0].weight.dtype == parts[1][0].weight.dtype == torch.bfloat16
        loss = _loss(model, TASKS["gan"], torch.Generator(), torch.bfloat16)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        states = saved(model)
        for i, optimizer in enumerate(optimizers):
            transforms.restore(model, optimizer)
            assert type(optimizer) is torch.optim.Adam
            dtypes = [part[0].weight.dtype for part in parts]
            assert dtypes == [torch.float32, torch.float32 if i else torch.bfloat16]
        assert_same(saved(model), states)


class _Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class TestKnobs:
    @pytest.mark.parametrize(
        ("asked", "passes"),
        [
            ({}, [FUSE_STEP, *BY_DEFAULT]),
            ({"dtype": torch.bfloat16}, [FUSE_STEP, *BY_DEFAULT, SPLIT]),
            ({"level": "O0"}, []),
            ({"level": "O0", FUSE_STEP: True}, [FUSE_STEP]),
            (
                {"level": "O0", FUSE_STEP: True, SPLIT: True, "dtype": torch.bfloat16},
                [FUSE_STEP, SPLIT],
            ),
            ({FUSE_STEP: False}, [*BY_DEFAULT]),
        ],
    )
    def test_defaults(self, asked: dict[str, Any], passes: list[str]) -> None:
        model, optimizer = transforms.optimize(*_small(), **asked)
        assert list(transforms.report(model).passes) == passes
        assert (type(optimizer) is torch.optim.SGD) == (FUSE_STEP not in passes)

    @pytest.mark.parametrize("cls", [torch.optim.RMSprop, _Own])
    def test_no_fused_step(self, cls: Any) -> None:
        """By default it is left, with the reason; what was asked for raises."""
        model, optimizer = _small(cls)
        train(model, optimizer)
        before = _facts(model, optimizer)
        new, its = transforms.optimize(model, optimizer)
        assert type(its) is cls
        (left,) = transforms.report(new).left(FUSE_STEP)
        assert left.where == "optimizer"
        assert "fuse_update_step=False" in left.what
        asked: list[Any] = [{FUSE_STEP: True}, {"dtype": torch.bfloat16}]
        for arguments in (*asked, asked[0] | asked[1]):
            for inplace in (False, True):
                with pytest.raises((TypeError, RuntimeError), match="fuse_update_step=False"):
                    transforms.optimize(
                        model, optimizer, inplace=inplace, auto_channels_last=True, **arguments
                    )
                assert repr(_facts(model, optimizer)) == repr(before)

    def test_report(self) -> None:
        model, _ = transforms.optimize(*_small(), dtype=torch.bfloat16)
        report = transforms.report(model)
        assert report.bytes_saved(SPLIT) == 2 * (4 * 3 * 9 + 4 + 2 * 16 + 2)
        text, page = str(report), report._repr_html_()
        for shown in (
            FUSE_STEP,
            SPLIT,
            "Sequential for training",
            "FusedSGD",
            "BatchNorm2d uses it",
        ):
            assert shown in text
            assert shown in page

    def test_no_effect(self) -> None:
        norm = nn.LayerNorm(3)
        optimizer = torch.optim.SGD(norm.parameters())
        before = _facts(norm, optimizer)
        with pytest.warns(transforms.NoEffectWarning, match=f"{SPLIT} changed nothing"):
            transforms.optimize(norm, optimizer, dtype=torch.bfloat16)
        with pytest.warns(
            transforms.NoEffectWarning, match=f"{FUSE_STEP} changed nothing.*already"
        ):
            transforms.optimize(norm, FusedSGD(norm.parameters()), fuse_update_step=True)
        with pytest.raises(transforms.NoEffectWarning):  # as an error, which undoes all
            transforms.optimize(norm, optimizer, dtype=torch.bfloat16, inplace=True)
        transforms.optimize(norm, optimizer)  # without a warning
        transforms.optimize(norm, FusedSGD(norm.parameters()))
        assert repr(_facts(norm, optimizer)) == repr(before)

    def test_optimizer_made_with_split(self) -> None:
        model, optimizer = _small(FusedSGD, split=True)
        weights = list(optimizer.master_params())
        with pytest.warns(transforms.NoEffectWarning, match="already split"):
            transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
        for name, weight in zip(dict(model.named_parameters()), weights):
            assert torch.equal(model.state_dict()[name], weight)


PLACES = {
    "fuse": "transforms.passes.fuse_step.fuse_update_step",
    "split": "transforms.rewrites.split.attach",
    "warning": "transforms.front_end._warn_of_no_effect",
}


@contextmanager
def _failing(place: str) -> Iterator[None]:
    """Something fails in a call that optimizes."""

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with mock.patch(PLACES[place], fail), pytest.raises(MemoryError):
        yield


class TestFailures:
    """Leave the pair as it was before the call that failed."""

    @pytest.mark.parametrize(
        ("fails", "inplace", "is_second"),
        [
            *((fails, inplace, False) for fails in PLACES for inplace in (False, True)),
            *((fails, True, True) for fails in ("split", "warning")),
        ],
    )
    def test_of_a_pair(self, fails: str, inplace: bool, is_second: bool) -> None:
        model, optimizer = _small(momentum=0.9)
        asked: dict[str, Any] = {"dtype": torch.bfloat16, "inplace": inplace}
        if is_second:
            transforms.optimize(model, optimizer, auto_channels_last=False, **asked)
        train(model, optimizer)
        before, states = _facts(model, optimizer), saved(model, optimizer)
        with _failing(fails):
            transforms.optimize(model, optimizer, auto_channels_last=True, **asked)
        assert _without_addresses(_facts(model, optimizer)) == _without_addresses(before)
        assert_same(saved(model, optimizer), states)
        train(model, optimizer, seed=1)
        if is_second:
            transforms.restore(model, optimizer)
        transforms.optimize(model, optimizer, **asked)

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_of_a_second_call_for_inference(self, dtype: torch.dtype | None) -> None:
        model = randomise(nn.Sequential(*_small()[0], nn.Dropout(), nn.BatchNorm1d(2)))
        arguments: dict[str, Any] = {"level": "O0", "inplace": True}
        transforms.optimize(model, dtype=dtype, conv_bn_folding=True, **arguments)
        before, states = fingerprint(model), saved(model)
        with _failing("warning"):
            transforms.optimize(model, dtype=torch.bfloat16, inplace=True, auto_channels_last=True)
        assert without_addresses(fingerprint(model)) == without_addresses(before)
        assert_same(saved(model), states)
        transforms.restore(model)
        assert_same(saved(model), states)

    def test_model_that_is_optimized_for_inference(self) -> None:
        model, _ = _small()
        optimized = transforms.optimize(model.eval()).train()
        its = torch.optim.SGD(optimized.parameters())
        for inplace in (False, True):
            with pytest.raises(ValueError, match=r"transforms.restore\(model\) first"):
                transforms.optimize(optimized, its, inplace=inplace)
        transforms.restore(optimized)
        transforms.optimize(optimized, its)

    def test_trained_model_for_inference(self) -> None:
        model, optimizer = transforms.optimize(*_small(), dtype=torch.bfloat16)
        train(model, optimizer)
        states = saved(model)
        optimized = transforms.optimize(model.eval(), dtype=torch.bfloat16)
        assert_same(saved(optimized), states)
        assert "Sequential for inference" in str(transforms.report(optimized))
        assert model[4].weight.dtype == torch.bfloat16
        train(model.train(), optimizer)


def _without_addresses(facts: list[Any]) -> str:
    """Of :func:`_facts`, less where the values of parameters lie."""
    return repr([without_addresses(facts[0]), *facts[1:]])


EPOCHS = 8
TESTED = 360
LAYERS = 3
"""Of those whose weights are split."""


def _network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def _trained_on_digits(case: OptimizerCase, *, autocast: bool, split: bool) -> tuple[float, float]:
    """The loss over all images, and the accuracy over those that were not trained on."""
    torch.manual_seed(SEED)
    bundle = load_digits()
    images = torch.from_numpy(bundle.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(bundle.target).long()
    test, train = torch.randperm(len(labels)).split([TESTED, len(labels) - TESTED])
    model = _network()
    momentum = {"momentum": 0.9} if case.name == "FusedSGD" else {}
    optimizer = case.reference(model.parameters(), lr=RATES[case.name], **momentum)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS)
    if split:
        transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
    precision = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
    for _ in range(EPOCHS):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            with precision:
                logits = model(images[batch])
            cross_entropy(logits.float(), labels[batch]).backward()
            optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad(), precision:
        logits = model(images).float()
    right = (logits.argmax(dim=1) == labels)[test]
    return cross_entropy(logits, labels).item(), right.float().mean().item()


@each_class
def test_halves_train_as_float32_does(case: OptimizerCase) -> None:
    exact = _trained_on_digits(case, autocast=False, split=False)
    rounded = _trained_on_digits(case, autocast=True, split=False)
    split = _trained_on_digits(case, autocast=True, split=True)
    # Under autocast the plain network rounds its weights to bfloat16 for each pass, and the split
    # one's are truncated: in each layer they, and so the outputs, differ by less than the spacing
    # of bfloat16. From float32 both differ by the roundings of inputs and outputs besides.
    spacing = LAYERS * torch.finfo(torch.bfloat16).eps
    assert split[0] == pytest.approx(rounded[0], rel=spacing)
    assert split[0] == pytest.approx(exact[0], rel=3 * spacing)
    for other in (rounded, exact):
        assert split[1] == pytest.approx(other[1], abs=1.01 / TESTED)
    assert split[1] > 0.96
