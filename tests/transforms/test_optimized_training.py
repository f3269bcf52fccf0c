"""optimize(model, optimizer): whole trainings, checkpoints, undoing, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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
from transforms.passes.fuse_step import fuse_update_step
from transforms.passes.split_weights import split_master_weights

STEPS = 20
SEED = 0
each_task = pytest.mark.parametrize("task", TASKS)
each_dtype = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
FUSE, SPLIT = "fuse_update_step", "split_master_weight_for_bf16"


@contextmanager
def _precision(dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is not None):
        yield


def _loss(model: nn.Module, task: Task, generator: torch.Generator, dtype: Any) -> Tensor:
    with _precision(dtype):
        return task.loss(model, generator)


def _train(
    model: nn.Module,
    optimizer: Any,
    task: Task,
    dtype: torch.dtype | None = None,
    steps: int = 2,
    seed: int = SEED,
    schedulers: Any = (),
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        _loss(model, task, generator, dtype).backward()
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def _pair(case: OptimizerCase, task: str, steps: int = 2) -> tuple[nn.Module, Any, Task]:
    """A model in training, and its optimizer, which has state."""
    chosen, kwargs = task_and_kwargs(task, case)
    torch.manual_seed(SEED)
    model = chosen.make()
    optimizer = case.reference(model.parameters(), **kwargs)
    _train(model, optimizer, chosen, steps=steps)
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

        class Optimized:
            def __new__(cls, params: Any, **kwargs: Any) -> Any:
                optimizer = case.reference(params, **kwargs)
                pair = transforms.optimize(
                    model, optimizer, dtype=dtype, inplace=True, auto_channels_last=is_last
                )
                assert pair == (model, optimizer)
                return optimizer

        plain = [p.detach().clone() for p in model.parameters()]
        pair = SideBySide(
            dataclasses.replace(case, cls=Optimized), kwargs, list(model.parameters())
        )
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
    @pytest.mark.parametrize("how", ["copy", "in place", "fused at step 7"])
    # torch's Adagrad, of its own sparse tensors
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_ends_as_near_to_float64_as_torch_does(
        self, case: OptimizerCase, task: str, how: str
    ) -> None:
        """With a scheduler that was made before, if that can be, and one that is made later."""
        chosen, kwargs = task_and_kwargs(task, case)
        torch.manual_seed(SEED)
        start = chosen.make()

        def trained(model: nn.Module, is_ours: bool) -> nn.Module:
            optimizer: Any = case.reference(model.parameters(), **kwargs)
            schedulers: list[Any] = []
            if how != "copy":
                schedulers.append(StepLR(optimizer, 5, gamma=0.5))
            if is_ours and how in ("copy", "in place"):
                model, optimizer = transforms.optimize(model, optimizer, inplace=how == "in place")
                assert optimizer.fused
            generator = torch.Generator().manual_seed(SEED)
            for step in range(STEPS):
                if is_ours and how == "fused at step 7" and step == 7:
                    fuse_update_step(optimizer)
                if step == (0 if how == "copy" else STEPS // 2):
                    schedulers.append(CosineAnnealingLR(optimizer, T_max=STEPS))
                optimizer.zero_grad()
                chosen.loss(model, generator).backward()
                optimizer.step()
                for scheduler in schedulers:
                    scheduler.step()
            return model

        exact = trained(copy.deepcopy(start).double(), False)
        plain, ours = (trained(copy.deepcopy(start), is_ours) for is_ours in (False, True))
        assert _distance(ours, start) > 100 * _distance(ours, exact)  # it has moved
        # Roundings of forward and backward, which both have, make most of the error; the factor of
        # 3 is for the step's own, which add up differently in each.
        assert _distance(ours, exact) <= 3 * _distance(plain, exact)


def _distance(model: nn.Module, other: nn.Module) -> float:
    """The norm of the difference of all parameters."""
    pairs = zip(model.parameters(), other.parameters())
    return sum((p.double() - q.double()).square().sum().item() for p, q in pairs) ** 0.5


class TestCheckpoints:
    """Those of an optimized pair are those of the plain one, bit for bit, in both directions."""

    @each_task
    @each_class
    @each_dtype
    # torch's Adagrad, of its own sparse tensors
    @pytest.mark.filterwarnings("ignore:Sparse invariant checks")
    def test_both_ways(self, case: OptimizerCase, task: str, dtype: torch.dtype | None) -> None:
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
        new.load_state_dict(states[0])
        its.load_state_dict(states[1])
        assert_same(saved(new, its), states)
        _train(new, its, chosen, dtype, seed=3)

    @each_dtype
    def test_pickled_and_copied_together(self, dtype: torch.dtype | None) -> None:
        pair = transforms.optimize(*_small(momentum=0.9), dtype=dtype)
        train(*pair)
        for model, optimizer in (copy.deepcopy(pair), pickle.loads(pickle.dumps(pair))):
            assert_same(saved(model, optimizer), saved(*pair))
            train(model, optimizer, seed=1)
            transforms.restore(model, optimizer)
            assert type(optimizer) is torch.optim.SGD
            assert model[0].weight.dtype == torch.float32


class TestUndone:
    @each_task
    @each_class
    @each_dtype
    def test_restore(self, case: OptimizerCase, task: str, dtype: torch.dtype | None) -> None:
        model, optimizer, chosen = _pair(case, task)
        before, cls = saved(model, optimizer), type(optimizer)
        strides = [p.stride() for p in model.parameters()]
        own = sorted(vars(optimizer))
        facts = [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()]
        transforms.optimize(model, optimizer, inplace=True, dtype=dtype)
        assert transforms.restore(model, optimizer) == (model, optimizer)
        assert type(optimizer) is cls
        assert sorted(vars(optimizer)) == own
        assert [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()] == facts
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert [p.stride() for p in model.parameters()] == strides
        assert_same(saved(model, optimizer), before)
        _train(model, optimizer, chosen, seed=1)

    @each_dtype
    def test_what_was_trained_stays(self, dtype: torch.dtype | None) -> None:
        model, optimizer = transforms.optimize(*_small(momentum=0.9), dtype=dtype)
        train(model, optimizer)
        states = saved(model, optimizer)
        transforms.restore(model, optimizer)
        assert_same(saved(model, optimizer), states)
        assert model[0].weight.is_contiguous()

    def test_needs_the_optimizer_that_has_the_halves(self) -> None:
        model, optimizer = transforms.optimize(*_small(), dtype=torch.bfloat16)
        expected = fingerprint(model)
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
    def test_the_original_is_untouched(self, cls: Any, dtype: torch.dtype | None) -> None:
        model, optimizer = _small(cls)
        train(model, optimizer)
        before = _facts(model, optimizer)
        new, its = transforms.optimize(model, optimizer, dtype=dtype)
        train(new, its)
        assert repr(_facts(model, optimizer)) == repr(before)
        assert new is not model
        assert its is not optimizer

    @each_dtype
    def test_both_train_alike(self, dtype: torch.dtype | None) -> None:
        model, optimizer = _small(torch.optim.AdamW)
        train(model, optimizer)
        new, its = transforms.optimize(model, optimizer, dtype=dtype)
        same, own = transforms.optimize(model, optimizer, dtype=dtype, inplace=True)
        assert same is model
        assert own is optimizer
        for pair in ((new, its), (same, own)):
            train(*pair, seed=1)
        assert_same(saved(new, its), saved(same, own))

    @each_dtype
    @pytest.mark.parametrize("inplace", [False, True])
    def test_twice(self, dtype: torch.dtype | None, inplace: bool) -> None:
        asked = {"dtype": dtype, FUSE: True, "auto_channels_last": True}
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
        assert len(transforms.report(model).done(FUSE)) == 1
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
        transforms.optimize(model, optimizer, inplace=True)
        after = StepLR(optimizer, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as a scheduler's that sees no step
            train(model, optimizer, steps=1)
            before.step()
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
            assert parts[i][0].weight.dtype == torch.float32
        assert_same(saved(model), states)


class _Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class TestKnobs:
    def test_defaults(self) -> None:
        pair = _small()
        passes = transforms.report(transforms.optimize(*pair)[0]).passes
        assert list(passes) == [FUSE, "auto_channels_last"]
        passes = transforms.report(transforms.optimize(*pair, dtype=torch.bfloat16)[0]).passes
        assert list(passes) == [FUSE, "auto_channels_last", SPLIT]
        assert transforms.report(transforms.optimize(*pair, level="O0")[0]).passes == {}
        asked: dict[str, Any] = {"level": "O0", FUSE: True}
        assert list(transforms.report(transforms.optimize(*pair, **asked)[0]).passes) == [FUSE]
        asked |= {SPLIT: True, "dtype": torch.bfloat16}
        passes = transforms.report(transforms.optimize(*pair, **asked)[0]).passes
        assert list(passes) == [FUSE, SPLIT]
        off: dict[str, Any] = {FUSE: False}
        model, optimizer = transforms.optimize(*pair, **off)
        assert type(optimizer) is torch.optim.SGD
        assert FUSE not in transforms.report(model).passes

    @pytest.mark.parametrize("cls", [torch.optim.RMSprop, _Own])
    def test_no_fused_step(self, cls: Any) -> None:
        """By default it is left, with the reason; what was asked for raises."""
        model, optimizer = _small(cls)
        train(model, optimizer)
        before = _facts(model, optimizer)
        new, its = transforms.optimize(model, optimizer)
        assert type(its) is cls
        (left,) = transforms.report(new).left(FUSE)
        assert left.where == "optimizer"
        assert "fuse_update_step=False" in left.what
        asked: list[Any] = [{FUSE: True}, {"dtype": torch.bfloat16}]
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
        for shown in (FUSE, SPLIT, "Sequential for training", "FusedSGD", "BatchNorm2d uses it"):
            assert shown in text
            assert shown in page

    def test_no_effect(self) -> None:
        norm = nn.LayerNorm(3)
        optimizer = torch.optim.SGD(norm.parameters())
        before = _facts(norm, optimizer)
        with pytest.warns(transforms.NoEffectWarning, match=f"{SPLIT} changed nothing"):
            transforms.optimize(norm, optimizer, dtype=torch.bfloat16)
        with pytest.warns(transforms.NoEffectWarning, match=f"{FUSE} changed nothing.*already"):
            transforms.optimize(norm, FusedSGD(norm.parameters()), fuse_update_step=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            transforms.optimize(norm, optimizer)
            transforms.optimize(norm, FusedSGD(norm.parameters()))
            with pytest.raises(transforms.NoEffectWarning):
                transforms.optimize(norm, optimizer, dtype=torch.bfloat16, inplace=True)
        assert repr(_facts(norm, optimizer)) == repr(before)

    def test_optimizer_made_with_split(self) -> None:
        model, optimizer = _small(FusedSGD, split=True)
        weights = list(optimizer.master_params())
        with pytest.warns(transforms.NoEffectWarning, match="already split"):
            transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
        for name, weight in zip(dict(model.named_parameters()), weights):
            assert torch.equal(model.state_dict()[name], weight)

    def test_frozen_weights_and_weights_of_no_optimizer(self) -> None:
        model, _ = _small()
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        new, _ = transforms.optimize(model, optimizer, dtype=torch.bfloat16)
        assert new[0].weight.dtype == torch.bfloat16
        assert new[4].weight.dtype == torch.float32
        assert "the optimizer does not update it" in str(transforms.report(new))


class TestFailures:
    """Leave the pair as it was before the call that failed."""

    @pytest.mark.parametrize("fails", ["fuse", "split", "warning"])
    @pytest.mark.parametrize("inplace", [False, True])
    def test_the_first_call(
        self, fails: str, inplace: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = _small(momentum=0.9)
        train(model, optimizer)
        before = _facts(model, optimizer)
        self._break(monkeypatch, fails)
        with pytest.raises(MemoryError):
            transforms.optimize(
                model, optimizer, dtype=torch.bfloat16, inplace=inplace, auto_channels_last=True
            )
        assert _without_addresses(_facts(model, optimizer)) == _without_addresses(before)
        monkeypatch.undo()
        transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=inplace)

    @pytest.mark.parametrize("fails", ["split", "warning"])
    def test_a_second_call_undoes_its_own_changes(
        self, fails: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, optimizer = _small(momentum=0.9)
        transforms.optimize(
            model, optimizer, dtype=torch.bfloat16, inplace=True, auto_channels_last=False
        )
        train(model, optimizer)
        before, states = _facts(model, optimizer), saved(model, optimizer)
        self._break(monkeypatch, fails)
        with pytest.raises(MemoryError):
            transforms.optimize(
                model, optimizer, dtype=torch.bfloat16, inplace=True, auto_channels_last=True
            )
        assert _without_addresses(_facts(model, optimizer)) == _without_addresses(before)
        assert_same(saved(model, optimizer), states)
        train(model, optimizer, seed=1)
        transforms.restore(model, optimizer)

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_a_second_call_for_inference(self, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model = randomise(nn.Sequential(*_small()[0], nn.Dropout(), nn.BatchNorm1d(2)))
        arguments: dict[str, Any] = {"level": "O0", "inplace": True}
        transforms.optimize(model, dtype=dtype, conv_bn_folding=True, **arguments)
        before, states = fingerprint(model), saved(model)
        self._break(monkeypatch, "warning")
        with pytest.raises(MemoryError):
            transforms.optimize(model, dtype=torch.bfloat16, inplace=True, auto_channels_last=True)
        assert without_addresses(fingerprint(model)) == without_addresses(before)
        assert_same(saved(model), states)
        transforms.restore(model)
        assert_same(saved(model), states)

    def _break(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise MemoryError

        place = {
            "fuse": "transforms.passes.fuse_step.fuse_update_step",
            "split": "transforms.rewrites.split.attach",
            "warning": "transforms.front_end._warn_of_no_effect",
        }
        monkeypatch.setattr(place[what], fail)

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


class Result(NamedTuple):
    """Of a whole training on handwritten digits."""

    loss: float
    """over all images."""
    accuracy: float
    """over those that were not trained on."""


def _trained_on_digits(case: OptimizerCase, *, autocast: bool, split: bool) -> Result:
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
        fuse_update_step(optimizer)
        split_master_weights(model, optimizer)
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
    return Result(cross_entropy(logits, labels).item(), right.float().mean().item())


@each_class
def test_halves_train_as_float32_does(case: OptimizerCase) -> None:
    exact = _trained_on_digits(case, autocast=False, split=False)
    rounded = _trained_on_digits(case, autocast=True, split=False)
    split = _trained_on_digits(case, autocast=True, split=True)
    # Under autocast the plain network rounds its weights to bfloat16 for each pass, and the split
    # one's are truncated: in each layer they, and so the outputs, differ by less than the spacing
    # of bfloat16. From float32 both differ by the roundings of inputs and outputs besides.
    spacing = LAYERS * torch.finfo(torch.bfloat16).eps
    assert split.loss == pytest.approx(rounded.loss, rel=spacing)
    assert split.loss == pytest.approx(exact.loss, rel=3 * spacing)
    for other in (rounded, exact):
        assert split.accuracy == pytest.approx(other.accuracy, abs=1.01 / TESTED)
    assert split.accuracy > 0.96
