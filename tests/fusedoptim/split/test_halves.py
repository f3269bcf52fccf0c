"""Optimizers with some parameters split into halves and others whole."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, load, save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.nn import Parameter

from fusedoptim import FusedAdagrad, FusedAdam, FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.offload import OffloadOptimizer
from tests.fusedoptim.helpers import (
    SideBySide,
    assert_same_bits,
    each_way_to_copy,
    exact_values,
    make_params,
    params_of,
    refused,
    step_alike,
    unchanged,
)
from tests.optimizer_cases import CASES, OptimizerCase, configuration_id

each_whole_case = pytest.mark.parametrize(
    "case", [case for case in CASES if not case.is_split], ids=configuration_id
)
RELOADS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda optimizer: optimizer,
    "state_dict": lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()) or optimizer,
    "state_dict among processes": lambda optimizer: _reloaded_among_processes(optimizer),
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
}
LAYOUTS = ("17", "1000", "channels_last", "transposed", "strided", "0-d", "empty")


def _reloaded_among_processes(optimizer: Any) -> Any:
    """Its state_dict has int32 copies of the lower halves there."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        distributed.destroy_process_group()
    return optimizer


def _pair(case: OptimizerCase, every: int = 2, steps: int = 0) -> SideBySide:
    """A pair in which each ``every``-th parameter is split, after some steps."""
    pair = SideBySide(case, params=make_params(torch.float32, LAYOUTS))
    pair.train(steps)
    pair.ours.split_params(pair.params[::every])
    return pair


def _trained(steps: int = 2) -> tuple[Any, list[Parameter]]:
    params = [Parameter(torch.randn(n)) for n in (40, 3, 17)]
    optimizer = FusedAdam(params, lr=0.01)
    optimizer.split_params(params[:2])
    for _ in range(steps):
        step_alike(optimizer)
    return optimizer, params


@each_whole_case
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("every", [1, 2])
def test_parity(case: OptimizerCase, every: int, steps: int) -> None:
    pair = _pair(case, every, steps)
    pair.train(4)
    for i, p in enumerate(pair.params):
        assert p.dtype == (torch.float32 if i % every else torch.bfloat16)
        assert ("trail" in pair.ours.state[p]) == pair.ours.is_split(p) == (i % every == 0)


@each_whole_case
def test_merged_again(case: OptimizerCase) -> None:
    pair = _pair(case)
    pair.train()
    values, strides = exact_values(pair.ours), [p.stride() for p in pair.params]
    pair.ours.merge_params(pair.params[::2])
    for p, value in values.items():
        assert p.dtype == p.grad.dtype == torch.float32
        assert torch.equal(p, value)
        assert "trail" not in pair.ours.state[p]
    assert [p.stride() for p in pair.params] == strides
    pair.train()


def test_untouched_parameters_have_no_state_when_merged() -> None:
    p = Parameter(torch.randn(5))
    optimizer = FusedAdam([p])
    optimizer.split_params([p])
    optimizer.merge_params([p])
    assert p not in optimizer.state
    assert not list(optimizer.halves)


def test_splitting_twice_changes_nothing() -> None:
    optimizer, params = _trained()
    with unchanged(optimizer):
        optimizer.split_params(params[:2])


def test_gradients_and_objects_stay() -> None:
    p = Parameter(torch.randn(5))
    p.grad = torch.randn(5)
    grad = p.grad
    optimizer = FusedSGD([p])
    optimizer.split_params([p])
    assert optimizer.param_groups[0]["params"] == [p]
    assert torch.equal(p.grad, grad.bfloat16())


def test_clipping_and_scaling_are_of_all_parameters() -> None:
    params = make_params(torch.float32, ["17", "1000"])
    pair = SideBySide(CASES[0], {"lr": 0.1}, params)
    pair.ours.max_grad_norm = 0.5
    pair.ours.split_params(params[:1])
    pair.set_gradients()
    torch.nn.utils.clip_grad_norm_(pair.references, 0.5)
    pair.check()


class TestBadInput:
    def test_strange_parameter(self) -> None:
        optimizer = FusedSGD([Parameter(torch.ones(2))])
        with pytest.raises(ValueError, match=r"shape \(3,\) is not one of the optimizer's"):
            optimizer.split_params([Parameter(torch.ones(3))])

    def test_dtype(self) -> None:
        params = [Parameter(torch.ones(2)), Parameter(torch.ones(2, dtype=torch.float64))]
        optimizer = FusedSGD(params)
        with pytest.raises(TypeError, match="float64; split parameters"):
            optimizer.split_params(params)
        assert params[0].dtype == torch.float32
        assert not list(optimizer.halves)

    @pytest.mark.parametrize("chosen", [0, 1])
    def test_memory_shared_with_one_that_stays(self, chosen: int) -> None:
        whole = torch.ones(6)
        params = [Parameter(whole[:4]), Parameter(whole[2:])]
        with pytest.raises(RuntimeError, match="share memory"):
            FusedSGD(params).split_params([params[chosen]])

    def test_merging_what_is_not_split(self) -> None:
        p = Parameter(torch.ones(2))
        with pytest.raises(ValueError, match=r"cannot merge .*it is not split"):
            FusedSGD([p]).merge_params([p])
        with pytest.raises(ValueError, match=r"cannot merge .*all of the optimizer's are"):
            SplitSGD([p]).merge_params([p])

    def test_lost_trail(self) -> None:
        optimizer, params = _trained()
        optimizer.state.clear()
        for action in (optimizer.step, lambda: optimizer.merge_params(params[:2])):
            with refused(optimizer, ValueError, "lost its lower half"):
                action()

    def test_another_shape(self) -> None:
        p = Parameter(torch.randn(8, 4))
        optimizer = FusedSGD([p], split=True)
        p.data = torch.zeros(10, 4, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"shape \(10, 4\), and its lower half.*\(8, 4\)"):
            list(optimizer.master_params())

    def test_converted_afterwards(self) -> None:
        optimizer, params = _trained()
        params[1].data = params[1].data.float()
        with pytest.raises(TypeError, match="converted after it was split"):
            step_alike(optimizer)


class TestCheckpoints:
    @pytest.mark.parametrize("is_flat", [False, True])
    @pytest.mark.parametrize(
        "cls", [FusedAdamW, partial(OffloadOptimizer, optimizer_class=FusedAdamW)]
    )
    def test_of_torchs_functions_with_a_frozen_parameter(self, cls: Any, is_flat: bool) -> None:
        """They drop its lower half; the one that the optimizer has belongs to another weight."""
        flat = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        parts = []
        for _ in range(2):
            model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
            optimizer = cls(model.parameters(), split=True)
            model[0].weight.requires_grad_(False)
            model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
            parts.append((model, optimizer))
        frozen = parts[0][0][0].weight
        states = copy.deepcopy(get_state_dict(*parts[0], options=flat))
        with pytest.warns(UserWarning, match="no lower halves of the frozen parameters 0.weight,"):
            set_state_dict(
                *parts[1], model_state_dict=states[0], optim_state_dict=states[1], options=flat
            )
        first, *others = parts[0][1].master_params()
        loaded, *rest = parts[1][1].master_params()
        assert not torch.equal(first, loaded)
        assert torch.equal(frozen.float(), loaded)
        assert all(map(torch.equal, others, rest))

    @pytest.mark.parametrize("cls", [FusedAdagrad, FusedAdamW, FusedSGD])
    @pytest.mark.parametrize("is_flat", [False, True])
    def test_of_torchs_functions(self, cls: Any, is_flat: bool) -> None:
        """They load the state whose names the optimizer has; Adagrad has some from the start."""
        options = StateDictOptions(flatten_optimizer_state_dict=is_flat)
        model, loaded = nn.Linear(8, 5), nn.Linear(8, 5)
        optimizer, other = (cls(m.parameters(), lr=0.01, split=True) for m in (model, loaded))
        for _ in range(2):
            step_alike(optimizer)
        states = copy.deepcopy(get_state_dict(model, optimizer, options=options))
        set_state_dict(
            loaded, other, model_state_dict=states[0], optim_state_dict=states[1], options=options
        )
        assert all(map(torch.equal, other.master_params(), optimizer.master_params()))
        step_alike(optimizer, other)
        assert_same_bits(optimizer, other)

    @pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # as intended
    def test_of_torchs_files(self, tmp_path: Path) -> None:
        """A file that torch.distributed.checkpoint wrote for torch's class has no lower halves."""
        model, loaded = (nn.Linear(4, 3).bfloat16() for _ in range(2))
        theirs = torch.optim.AdamW(model.parameters())
        step_alike(theirs)
        weights, state = get_state_dict(model, theirs)
        save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
        optimizer = FusedAdamW(loaded.parameters(), split=True)
        weights, state = get_state_dict(loaded, optimizer)
        load(
            {"model": weights, "optimizer": state},
            checkpoint_id=tmp_path,
            planner=DefaultLoadPlanner(allow_partial_load=True),
            no_dist=True,
        )
        set_state_dict(loaded, optimizer, model_state_dict=weights, optim_state_dict=state)
        exact = [p.float() for p in model.parameters()]
        assert all(map(torch.equal, optimizer.master_params(), exact))
        for p, q in zip(model.parameters(), loaded.parameters()):
            assert torch.equal(optimizer.state[q]["exp_avg"], theirs.state[p]["exp_avg"].float())

    def test_goes_on_as_before(self) -> None:
        optimizer, params = _trained()
        twins = [Parameter(p.detach().clone()) for p in params]
        twin = FusedAdam(twins)
        twin.split_params(twins[:2])
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step_alike(optimizer, twin)
        assert_same_bits(optimizer, twin)

    def test_damaged(self) -> None:
        optimizer, _ = _trained()
        checkpoint = copy.deepcopy(optimizer.state_dict())
        del checkpoint["state"][1]["trail"]
        with refused(optimizer, ValueError, "lost the 'trail' of parameter 1"):
            optimizer.load_state_dict(checkpoint)

    def test_through_one_that_is_not_split(self) -> None:
        """An unsplit optimizer drops the lower halves, which its steps would not update."""
        optimizer, _ = _trained()
        whole = [Parameter(value) for value in optimizer.master_params()]
        between = FusedAdam(whole)
        between.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for p, state in between.state.items():
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}, tuple(p.shape)
        step_alike(between)
        last = FusedAdam([Parameter(p.detach().clone()) for p in whole], split=True)
        last.load_state_dict(copy.deepcopy(between.state_dict()))
        assert all(map(torch.equal, last.master_params(), whole))

    def test_of_a_parameter_without_a_step(self) -> None:
        """Its lower half is saved, and loads into an optimizer that has taken steps."""
        params = [Parameter(torch.randn(5)) for _ in range(2)]
        optimizer = FusedAdam(params, split=True)
        assert not optimizer.state
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
        assert list(optimizer.state) == params[:1]
        checkpoint = copy.deepcopy(optimizer.state_dict())
        assert checkpoint["state"][1].keys() == {"trail"}
        loaded = FusedAdam([Parameter(torch.randn(5)) for _ in range(2)], split=True)
        step_alike(loaded)
        with torch.no_grad():
            for p, q in zip(params_of(loaded), params):
                p.copy_(q)
        loaded.load_state_dict(checkpoint)
        assert list(loaded.state) == params_of(loaded)[:1]
        assert all(map(torch.equal, loaded.master_params(), optimizer.master_params()))
        step_alike(optimizer, loaded)
        assert_same_bits(optimizer, loaded)

    @each_way_to_copy
    def test_copies(self, copied: Any) -> None:
        optimizer, _ = _trained()
        twin = copied(optimizer)
        assert [twin.is_split(p) for p in params_of(twin)] == [True, True, False]
        step_alike(optimizer, twin)
        assert_same_bits(optimizer, twin)


class TestWrittenFromOutside:
    """A lower half belongs to the values of which it was split."""

    @pytest.mark.parametrize("cls", [FusedAdagrad, FusedAdam])
    def test_before_the_first_step(self, cls: Any) -> None:
        """Adagrad has state before its first step."""
        params = [Parameter(torch.randn(50)) for _ in range(2)]
        optimizer = cls(params, lr=0.0, split=True)
        kept = list(optimizer.master_params())[1]
        written = torch.randn(50).bfloat16()
        with torch.no_grad():
            params[0].copy_(written)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert all(map(torch.equal, optimizer.master_params(), (written.float(), kept)))

    @pytest.mark.parametrize("cls", [FusedAdagrad, FusedAdam, FusedSGD])
    @pytest.mark.parametrize("reload", RELOADS)
    def test_after_its_own_state_came_back(self, cls: Any, reload: str) -> None:
        """Accelerate loads an optimizer's own state_dict; DDP then writes the upper halves."""
        optimizer = cls([Parameter(torch.randn(50)) for _ in range(2)], lr=0.0, split=True)
        kept = list(optimizer.master_params())[1]
        optimizer = RELOADS[reload](optimizer)
        params, written = params_of(optimizer), torch.randn(50).bfloat16()
        with torch.no_grad():
            params[0].copy_(written)
        for _ in range(2):
            assert all(map(torch.equal, optimizer.master_params(), (written.float(), kept)))
            optimizer.load_state_dict(optimizer.state_dict())
            step_alike(optimizer)

    @pytest.mark.parametrize("cls", [FusedAdagrad, FusedAdam, FusedSGD])
    def test_before_a_load(self, cls: Any) -> None:
        """A resumed training may load the model first."""
        optimizer, loaded = (cls([Parameter(torch.randn(50))], split=True) for _ in range(2))
        step_alike(optimizer)
        with torch.no_grad():
            params_of(loaded)[0].copy_(params_of(optimizer)[0])
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert all(map(torch.equal, loaded.master_params(), optimizer.master_params()))

    def test_after_a_load_of_torchs_state(self) -> None:
        theirs = torch.optim.Adam([torch.randn(50).bfloat16().requires_grad_()])
        step_alike(theirs)
        optimizer = FusedAdam([Parameter(torch.randn(50))], split=True)
        optimizer.load_state_dict(theirs.state_dict())
        (written,), (param,) = params_of(theirs), params_of(optimizer)
        with torch.no_grad():
            param.copy_(written)
        assert torch.equal(next(optimizer.master_params()), written.float())

    @pytest.mark.parametrize("cls", [FusedAdagrad, FusedAdam, FusedSGD])
    def test_steps_are_not_from_outside(self, cls: Any) -> None:
        optimizer = cls([Parameter(torch.randn(50))], split=True)
        step_alike(optimizer)
        (trail,) = (optimizer.state[p]["trail"].clone() for p in params_of(optimizer))
        optimizer = copy.deepcopy(optimizer)
        (param,) = params_of(optimizer)
        assert trail.any()
        assert torch.equal(optimizer.state[param]["trail"], trail)
        with torch.no_grad():
            param.add_(1)
        assert torch.equal(optimizer.halves.trail(param), trail)

    @pytest.mark.parametrize("cls", [FusedAdagrad, FusedAdam, FusedSGD])
    @pytest.mark.parametrize("how", RELOADS)
    def test_before_a_copy(self, cls: Any, how: str) -> None:
        optimizer = cls([Parameter(torch.randn(50))], split=True)
        with torch.no_grad():
            params_of(optimizer)[0].copy_(torch.randn(50))
        values = params_of(optimizer)[0].detach().float()
        optimizer = RELOADS[how](optimizer)
        assert torch.equal(next(optimizer.master_params()), values)

    def test_after_a_load(self) -> None:
        """The upper halves may be loaded after the lower ones."""
        saved = FusedAdam([Parameter(torch.randn(50))], split=True)
        loaded = FusedAdam([Parameter(torch.randn(50))], split=True)
        loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
        with torch.no_grad():
            params_of(loaded)[0].copy_(params_of(saved)[0])
        assert all(map(torch.equal, loaded.master_params(), saved.master_params()))


class TestHalves:
    """``halves`` is the part of an optimizer that its model refers to."""

    def test_copied_together(self) -> None:
        optimizer, _ = _trained()
        for order in ((optimizer, optimizer.halves), (optimizer.halves, optimizer)):
            copies = copy.deepcopy(order)
            (twin,) = (o for o in copies if isinstance(o, FusedAdam))
            assert twin.halves in copies
            step_alike(twin)
            for p in twin.halves:
                assert twin.halves.trail(p) is twin.state[p]["trail"]

    def test_copied_alone(self) -> None:
        optimizer, params = _trained()
        values = [optimizer.halves.exact(p) for p in params[:2]]
        halves = copy.deepcopy(optimizer.halves)
        step_alike(optimizer)
        assert all(torch.equal(halves.exact(p), value) for p, value in zip(halves, values))

    def test_outlive_the_optimizer_without_its_moments(self) -> None:
        optimizer, params = _trained()
        halves, values = optimizer.halves, [optimizer.halves.exact(p) for p in params[:2]]
        moment = weakref.ref(optimizer.state[params[0]]["exp_avg"])
        del optimizer
        assert moment() is None
        assert all(torch.equal(halves.exact(p), value) for p, value in zip(halves, values))

    def test_let_go_of_a_parameter_that_was_removed(self) -> None:
        params = [Parameter(torch.randn(5)) for _ in range(2)]
        optimizer = FusedAdam([{"params": [p]} for p in params], split=True)
        step_alike(optimizer)
        removed = weakref.ref(params[1])
        del optimizer.state[params.pop()], optimizer.param_groups[1]
        step_alike(optimizer)
        assert removed() is None

    def test_follow_a_state_that_is_replaced(self) -> None:
        optimizer, params = _trained()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert optimizer.halves.trail(params[0]) is optimizer.state[params[0]]["trail"]


def test_checkpoint_of_a_class_with_fewer_options() -> None:
    """A missing option is kept: checkpoints of IPEX's Lamb have the paper's options alone."""
    p = Parameter(torch.randn(5))
    optimizer = FusedLamb([p], trust_clip=True)
    step_alike(optimizer)
    checkpoint = copy.deepcopy(optimizer.state_dict())
    (group,) = checkpoint["param_groups"]
    for name in group.keys() - {"params", "lr", "betas", "eps", "weight_decay"}:
        del group[name]
    optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups[0]["trust_clip"] is True
    step_alike(optimizer)
