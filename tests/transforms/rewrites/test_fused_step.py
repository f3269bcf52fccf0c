"""torch's optimizers step as ours do, and are unchanged in everything else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler

from fusedoptim import FusedSGD
from fusedoptim.optimizer import FusedOptimizer
from tests.fusedoptim.helpers import (
    FEW_LAYOUTS,
    SideBySide,
    assert_same_state,
    make_params,
    new_scaler,
    params_of,
    random_like,
    snapshot,
    step_alike,
)
from tests.garbage import without_collections
from tests.optimizer_cases import TORCHS_CASES, OptimizerCase, configuration_id
from tests.transforms.helpers import assert_same, converted, each_class, new_params, new_twins
from transforms.passes.fuse_step import fuse_update_step
from transforms.rewrites.fused_step import unfuse

each_configuration = pytest.mark.parametrize(
    ("case", "kwargs"),
    [(case, kwargs) for case in TORCHS_CASES for kwargs in case.kwargs],
    ids=configuration_id,
)


def _set_gradients(*optimizers: Any) -> None:
    """Set equal gradients."""
    for twins in zip(*map(params_of, optimizers)):
        grad = random_like(twins[0])
        for p in twins:
            p.grad = grad.clone()


def _assert_equal(one: Any, other: Any) -> None:
    assert all(map(torch.equal, params_of(one), params_of(other)))


def _trained(case: OptimizerCase, steps: int = 2, **kwargs: Any) -> Any:
    optimizer = case.reference(new_params(), **(case.kwargs[-1] | kwargs))
    for _ in range(steps):
        step_alike(optimizer)
    return optimizer


def _fused(case: OptimizerCase) -> Any:
    optimizer = _trained(case)
    fuse_update_step(optimizer)
    return optimizer


class TestParity:
    @each_configuration
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_from_the_start(self, case: OptimizerCase, kwargs: Any, dtype: torch.dtype) -> None:
        pair = SideBySide(converted(case), kwargs, make_params(dtype, FEW_LAYOUTS))
        pair.train(2)
        pair.train(skip=[1])
        pair.train()

    @each_configuration
    def test_after_steps_of_torchs(self, case: OptimizerCase, kwargs: Any) -> None:
        """In float64, torch's own steps equal the reference's bit for bit."""
        pair = SideBySide(converted(case), kwargs, make_params(torch.float64, FEW_LAYOUTS))
        unfuse(pair.ours)
        pair.ours.param_groups[0]["foreach"] = False
        for _ in range(2):
            pair.set_gradients()
            pair.torchs.step()
            pair.ours.step()
        fuse_update_step(pair.ours)
        assert all(map(torch.equal, pair.params, pair.references))
        pair.train(3)

    @each_class
    def test_state_of_16_bit_parameters_is_widened(self, case: OptimizerCase) -> None:
        params = [Parameter(p.detach().bfloat16()) for p in new_params()]
        optimizer = case.reference(params, **case.kwargs[-1])
        step_alike(optimizer)
        before = snapshot(optimizer)
        fuse_update_step(optimizer)
        unfuse(optimizer)
        assert_same_state(optimizer, before)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        for state in optimizer.state.values():
            assert {v.dtype for k, v in state.items() if k != "step"} == {torch.float32}
        unfuse(optimizer)
        for state in optimizer.state.values():
            assert {v.dtype for k, v in state.items() if k != "step"} == {torch.bfloat16}
        step_alike(optimizer)


class TestSameObject:
    @each_class
    def test_there_and_back(self, case: OptimizerCase) -> None:
        """Fusing copies nothing, a second time changes nothing, and undoing restores everything."""
        optimizer = _trained(case)
        optimizer.register_state_dict_post_hook(lambda o, d: d | {"note": 1})
        groups, state, values = optimizer.param_groups, optimizer.state, snapshot(optimizer)
        group, attributes = dict(groups[0]), dict(vars(optimizer))
        before = copy.deepcopy(optimizer.state_dict())
        entry = fuse_update_step(optimizer)
        assert entry.done
        assert entry.what == f"the step of {_path(case.reference)} is now that of {case.name}"
        assert optimizer.param_groups is groups
        assert optimizer.state is state
        assert groups[0] == group
        assert_same_state(optimizer, values)
        assert_same(optimizer.state_dict(), before)
        assert isinstance(optimizer, case.reference)
        assert isinstance(optimizer, case.cls)
        assert optimizer.fused is True
        assert isinstance(optimizer, FusedOptimizer)
        fused = dict(vars(optimizer))
        entry = fuse_update_step(optimizer)
        assert (entry.done, "already" in entry.what) == (False, True)
        assert vars(optimizer) == fused
        unfuse(optimizer)
        assert type(optimizer) is case.reference
        assert vars(optimizer) == attributes
        assert_same(optimizer.state_dict(), before)

    @each_class
    def test_undone_after_steps(self, case: OptimizerCase) -> None:
        optimizer = _fused(case)
        step_alike(optimizer)
        unfuse(optimizer)
        steps = [s["step"] for s in optimizer.state.values() if "step" in s]
        assert len({step.untyped_storage().data_ptr() for step in steps}) == len(steps)
        step_alike(optimizer)

    def test_one_of_ours_is_fused_already(self) -> None:
        optimizer = FusedSGD(new_params())
        assert not fuse_update_step(optimizer).done
        assert type(optimizer) is FusedSGD
        unfuse(optimizer)
        assert type(optimizer) is FusedSGD
        assert optimizer.fused

    @each_class
    def test_original_step(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        twin = copy.deepcopy(optimizer)
        fuse_update_step(optimizer)
        _set_gradients(optimizer, twin)
        optimizer._original_step()
        twin.step()
        _assert_equal(optimizer, twin)

    @each_class
    def test_is_freed_when_dropped(self, case: OptimizerCase) -> None:
        optimizer = _trained(case)
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        reference = weakref.ref(optimizer)
        gc.collect()
        with without_collections():
            del optimizer, scheduler
            assert reference() is None


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.LinearLR(o)], optimizer=o
    ),
    "cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
}


class TestSchedulers:
    """Warnings are errors here, including torch's warning that a step was overridden."""

    @pytest.mark.parametrize("name", SCHEDULERS)
    @pytest.mark.parametrize("when", ["before", "after", "both", "before its first step"])
    @each_class
    def test_steps_are_ours(
        self, case: OptimizerCase, when: str, name: str, launches: list[int]
    ) -> None:
        if name == "cycle" and case.name == "FusedAdagrad":
            pytest.skip("has no momentum to cycle")
        optimizer, twin = new_twins(case.reference, **case.kwargs[-1])
        schedulers = [SCHEDULERS[name](twin)]
        if when != "after":
            schedulers.append(SCHEDULERS[name](optimizer))
        if when != "before its first step":
            step_alike(optimizer, twin)
            for scheduler in schedulers:
                scheduler.step()
        fuse_update_step(optimizer)
        if when == "after":
            schedulers.append(SCHEDULERS[name](optimizer))
        if when == "both":
            SCHEDULERS[name](optimizer)
        for i in range(3):
            step_alike(optimizer, twin)
            assert len(launches) == i + 1
            for scheduler in schedulers:
                scheduler.step()
        assert optimizer._opt_called

    @each_class
    def test_undone(self, case: OptimizerCase, launches: list[int]) -> None:
        optimizer = case.reference(new_params())
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        unfuse(optimizer)
        scheduler.step()
        step_alike(optimizer)
        scheduler.step()
        fuse_update_step(optimizer)
        step_alike(optimizer)
        assert len(launches) == 2
        assert optimizer.param_groups[0]["lr"] == optimizer.defaults["lr"] / 4

    def test_order_is_watched_still(self) -> None:
        optimizer = torch.optim.SGD(new_params())
        scheduler = lr_scheduler.StepLR(optimizer, 1)
        fuse_update_step(optimizer)
        with pytest.warns(UserWarning, match="before `optimizer.step\\(\\)`"):
            scheduler.step()


class TestAround:
    @each_class
    def test_hooks_and_closures(self, case: OptimizerCase) -> None:
        optimizer = case.reference(new_params())
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        fuse_update_step(optimizer)
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        _set_gradients(optimizer)
        params = params_of(optimizer)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params)
            assert isinstance(loss, Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        before = closure()
        loss = optimizer.step(closure)
        assert torch.equal(loss, before)
        assert seen == ["before", "after"]
        assert not torch.equal(optimizer.step(closure), before)

    @each_class
    def test_scaler(self, case: OptimizerCase) -> None:
        optimizer, twin = new_twins(case.reference, **case.kwargs[0])
        scalers = new_scaler(4.0), new_scaler(4.0)
        for i in range(5):
            if i == 1:
                fuse_update_step(optimizer)
            _set_gradients(optimizer, twin)
            if i == 3:
                for o in (optimizer, twin):
                    params_of(o)[1].grad[2] = torch.inf
            before = [p.detach().clone() for p in params_of(optimizer)]
            for o, scaler in zip((optimizer, twin), scalers):
                scaler.step(o)
                scaler.update()
            assert all(map(torch.equal, before, params_of(optimizer))) == (i == 3)
        torch.testing.assert_close(params_of(optimizer), params_of(twin))
        assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
        unfuse(optimizer)
        assert not hasattr(optimizer, "_step_supports_amp_scaling")

    @each_class
    def test_added_group(self, case: OptimizerCase) -> None:
        optimizer = _fused(case)
        new = Parameter(torch.randn(6))
        before = new.detach().clone()
        # The optimizer's own class ignores options that it does not know.
        optimizer.add_param_group({"params": [new], "lr": 0.5, "split": True})
        step_alike(optimizer)
        assert not torch.equal(new, before)
        with pytest.raises(RuntimeError, match=r"^differentiable=True"):
            optimizer.add_param_group({"params": new_params(), "differentiable": True})
        assert len(optimizer.param_groups) == 2

    @each_class
    def test_zero_grad(self, case: OptimizerCase) -> None:
        optimizer = _fused(case)
        _set_gradients(optimizer)
        optimizer.zero_grad(set_to_none=False)
        assert all(not p.grad.any() for p in params_of(optimizer))
        optimizer.zero_grad()
        assert all(p.grad is None for p in params_of(optimizer))

    @each_class
    @pytest.mark.parametrize("how", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
    def test_copies(self, case: OptimizerCase, how: Any, launches: list[int]) -> None:
        optimizer = _fused(case)
        step_alike(optimizer)
        twin = how(optimizer)
        assert type(twin) is type(optimizer)
        step_alike(optimizer, twin)
        assert len(launches) == 3
        _assert_equal(optimizer, twin)
        unfuse(twin)
        assert type(twin) is case.reference
        step_alike(twin)

    def test_torchs_fused_optimizer(self) -> None:
        """torch's fused optimizer tells the GradScaler already that it takes the scale."""
        optimizer = torch.optim.SGD(new_params(), fused=True)
        step_alike(optimizer)
        fuse_update_step(optimizer)
        step_alike(optimizer)
        unfuse(optimizer)
        assert optimizer._step_supports_amp_scaling
        step_alike(optimizer)
