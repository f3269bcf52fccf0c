"""Optimizing for training: knobs, copies, undoing, reports and failures."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR, StepLR
from torch.optim.swa_utils import AveragedModel

from fusedoptim import FusedSGD, SplitSGD, transforms
from tests.transforms.helpers import (
    SEED,
    assert_same,
    autocast_loss,
    each_dtype,
    fingerprint,
    hooks,
    interrupts_of,
    randomise,
    saved,
    train,
    without_addresses,
)
from tests.transforms.models import TASKS, small

FUSE_STEP, SPLIT = "fuse_update_step", "split_master_weight_for_bf16"
BY_DEFAULT = (
    *("parallel_dropout", "fuse_gelu", "fuse_frozen_batch_norm", "onednn_products"),
    *("auto_channels_last", "conv_as_matmul"),
)


def _facts(model: nn.Module, optimizer: Any) -> list[Any]:
    """List all that a call must not change if it fails or optimizes a copy."""
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


def _plain_facts(model: nn.Module, optimizer: Any) -> list[Any]:
    """What an optimized pair is again after it was restored, without addresses."""
    modules = [(type(m), sorted(vars(m))) for m in model.modules()]
    own = (type(optimizer), sorted(vars(optimizer)), optimizer.step.__wrapped__)
    layouts = [(id(p), p.dtype, p.stride()) for p in model.parameters()]
    return [modules, hooks(model), own, layouts]


def _small(cls: Any = torch.optim.SGD, **kwargs: Any) -> tuple[nn.Sequential, Any]:
    model = small()
    return model, cls(model.parameters(), lr=0.1, **kwargs)


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


class TestInterrupted:
    """After an interrupt, restore() gives the plain pair, if it is not plain already."""

    @each_dtype
    @pytest.mark.parametrize("is_restored", [False, True])
    def test_pair(self, is_restored: bool, dtype: torch.dtype | None) -> None:
        model, optimizer = _small(torch.optim.AdamW)
        StepLR(optimizer, 1)  # wraps the step
        train(model, optimizer, steps=1)
        expected, bits = _plain_facts(model, optimizer), saved(model, optimizer)

        def optimize() -> None:
            transforms.optimize(model, optimizer, dtype=dtype, inplace=True)

        def restore() -> None:
            if "_fusedoptim_report" in vars(model):
                transforms.restore(model, optimizer)

        for _ in (
            interrupts_of(restore, optimize, since="restore", every=13)
            if is_restored
            else interrupts_of(optimize, restore, since="_run", every=29)
        ):
            restore()
            assert _plain_facts(model, optimizer) == expected
            assert_same(saved(model, optimizer), bits)
            optimizer.step()
            optimizer.load_state_dict(bits[1])
            model.load_state_dict(bits[0])


class TestInPlaceAndCopied:
    @each_dtype
    @pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, FusedSGD])
    def test_train_alike(self, cls: Any, dtype: torch.dtype | None) -> None:
        """Both train alike, and the original of a copy is unchanged."""
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
        """Schedulers made before keep working after inplace=True, but do not drive a copy."""
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
        loss = autocast_loss(model, TASKS["gan"], torch.Generator(), torch.bfloat16)
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
        """By default the step is left, with the reason; an explicit request raises."""
        model, optimizer = _small(cls)
        train(model, optimizer)
        before = _facts(model, optimizer)
        new, its = transforms.optimize(model, optimizer)
        assert type(its) is cls
        (left,) = transforms.report(new).left(FUSE_STEP)
        assert left.where == "optimizer"
        assert "fuse_update_step=False" in left.what
        dtype: Any = {"dtype": torch.bfloat16}
        asked: Any = {FUSE_STEP: True}
        for arguments in (asked, dtype, asked | dtype):
            cure = "; or omit dtype" if "dtype" in arguments else "fuse_update_step=False"
            for inplace in (False, True):
                with pytest.raises((TypeError, RuntimeError), match=cure):
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
        with pytest.raises(transforms.NoEffectWarning):  # raised as an error, it undoes everything
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

    @pytest.mark.parametrize("cls", [SplitSGD, functools.partial(FusedSGD, split=True)])
    def test_outputs_of_tables_that_were_split_before(self, cls: Any) -> None:
        """They stay bfloat16, as the modules behind them have bfloat16 weights too."""
        model = nn.Sequential(nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        optimizer = cls(model.parameters(), lr=0.1)
        x = torch.randint(9, (3, 5))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(x)
            with pytest.warns(transforms.NoEffectWarning, match="already split"):
                transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
            assert torch.equal(model(x), expected)


PLACES = {
    "fuse": "transforms.passes.fuse_step.fuse_update_step",
    "split": "transforms.rewrites.split.attach",
    "warning": "transforms.front_end._warn_of_no_effect",
}


@contextmanager
def _failing(place: str) -> Iterator[None]:
    """Let a call that optimizes fail at a place."""

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    with mock.patch(PLACES[place], fail), pytest.raises(MemoryError):
        yield


class TestFailures:
    """A failed call leaves model and optimizer unchanged."""

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

    @pytest.mark.filterwarnings("ignore:the model was optimized for inference:UserWarning")
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
    """Format the result of :func:`_facts` without the addresses of the parameters' values."""
    return repr([without_addresses(facts[0]), *facts[1:]])
