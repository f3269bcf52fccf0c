"""The state of every optimizer that tests/optimizer_cases.py lists: made, saved, loaded, copied."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.fusedoptim.helpers import (
    SideBySide,
    assert_same_bits,
    each_case,
    each_case_and_dtype,
    each_class,
    each_way_to_copy,
    make_params,
    refused,
    run_in_threads,
    single,
    step_alike,
    through_a_file,
)
from tests.optimizer_cases import CASES, TORCHS_CASES, Kwargs, OptimizerCase, configuration_id

ADAMS = [case for case in CASES if "exp_avg_sq" in case.state_keys]


def _kind_of_state(case: OptimizerCase) -> set[str]:
    """The state by which a class differs from those whose checkpoints do not fit it."""
    return {*case.state_keys} - {"step", "trail", "max_exp_avg_sq"}


def _options(optimizer: Any) -> list[Kwargs]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


class TestState:
    """Keys, dtypes and shapes of the state, and every way to save, load and copy it."""

    @each_case_and_dtype
    def test_dtype_and_layout(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        params = make_params(dtype)
        optimizer = case.make(params, **case.kwargs[-1])
        assert bool(optimizer.state) == case.has_state_from_the_start
        step_alike(optimizer)
        dtypes = {"step": torch.float32, "trail": torch.int16}
        expected = torch.float64 if dtype == torch.float64 else torch.float32
        for p in params:
            assert set(optimizer.state[p]) == set(case.state_keys)
            for key, value in optimizer.state[p].items():
                assert value.dtype == dtypes.get(key, expected)
                assert value.shape == (() if key == "step" else p.shape)
                assert value.device == p.device
                assert not value.requires_grad

    @each_case_and_dtype
    def test_state_dict_round_trip(self, case: OptimizerCase, dtype: torch.dtype) -> None:
        """An optimizer that is saved and loaded stays bit-identical to one that is not."""
        params = make_params(dtype)
        copies = [Parameter(p.detach().clone()) for p in params]
        optimizer, other = (case.make(ps, **case.kwargs[-1]) for ps in (params, copies))
        for i in range(4):
            step_alike(optimizer, other)
            if i == 1:
                checkpoint = through_a_file(other.state_dict())
                other = case.make(copies, lr=0.7)
                other.load_state_dict(checkpoint)
        assert_same_bits(optimizer, other)
        assert all(set(optimizer.state[p]) == set(case.state_keys) for p in params)

    @each_class
    def test_state_dict_equals_the_references(self, case: OptimizerCase) -> None:
        for kwargs in case.kwargs:
            params = make_params(case.dtypes[0], ["17", "empty", "0-d"])
            pair = SideBySide(case, kwargs, params)
            pair.train()
            ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
            (group,), (expected,) = ours["param_groups"], torchs["param_groups"]
            if case.is_torchs:
                expected["foreach"] = None  # the pair itself sets this one
            else:
                for option in ("foreach", "capturable", "differentiable", "fused"):
                    assert not group.pop(option)
            shared = {key: value for key, value in group.items() if key not in case.own_arguments}
            assert shared == expected
            if not case.is_split:
                assert ours["state"].keys() == torchs["state"].keys()

    @each_class
    def test_state_dict_moves_both_ways(self, case: OptimizerCase) -> None:
        dtype = torch.float64 if torch.float64 in case.dtypes else torch.float32
        pair = SideBySide(case, params=make_params(dtype))
        pair.train()
        ours, torchs = pair.ours.state_dict(), pair.torchs.state_dict()
        if not case.is_split:  # a new optimizer would begin with lower halves of zero
            pair.ours = case.make(pair.params)
        pair.torchs = case.make_reference(pair.references)
        pair.ours.load_state_dict(torchs)
        pair.torchs.load_state_dict(ours)
        pair.train(2)

    @each_class
    def test_loading_keeps_the_implementation(self, case: OptimizerCase) -> None:
        (p,) = make_params(torch.float32, ["17"])
        checkpoint = case.reference([p]).state_dict()
        for kwargs in case.refused_kwargs:
            checkpoint["param_groups"][0].update(kwargs)
        optimizer = case.make([p])
        optimizer.load_state_dict(checkpoint)
        for kwargs in case.refused_kwargs:
            (option,) = kwargs
            assert optimizer.param_groups[0][option] == optimizer.defaults[option]
        p.grad = torch.ones_like(p)
        optimizer.step()

    @each_case
    def test_float32_state_of_bfloat16_parameters_survives(self, case: OptimizerCase) -> None:
        p, optimizer = single(case, "1000", torch.bfloat16)
        for _ in range(2):
            optimizer.step()
        other = case.make([p])
        seen = []
        other.register_load_state_dict_post_hook(
            lambda loaded: seen.append(loaded.state[p][case.state_keys[0]].dtype)
        )
        other.load_state_dict(optimizer.state_dict())
        assert seen == [torch.float32]
        for key in case.state_keys:
            assert torch.equal(other.state[p][key], optimizer.state[p][key])
            if key != "step":  # torch does not copy a step count
                assert other.state[p][key] is not optimizer.state[p][key]

    @each_case
    def test_load_of_another_model(self, case: OptimizerCase) -> None:
        _, other = single(case, "17")
        other.step()
        p, optimizer = single(case, "1000")
        before = p.detach().clone()
        with pytest.raises(ValueError, match=r"shape \(17,\)"):  # noqa: PT012 (whichever comes first)
            optimizer.load_state_dict(other.state_dict())
            assert not case.is_split
            optimizer.step()
        assert torch.equal(p, before)

    @each_class
    @pytest.mark.parametrize("saver", CASES, ids=configuration_id)
    @pytest.mark.parametrize("which", [0, -1])
    def test_load_of_another_class(
        self, case: OptimizerCase, saver: OptimizerCase, which: int
    ) -> None:
        """Loading is refused, and changes nothing, unless both classes have the same state."""
        _, saved = single(saver, "17", **saver.kwargs[which])
        saved.step()
        _, optimizer = single(case, "17")
        optimizer.step()
        if _kind_of_state(case) == _kind_of_state(saver):
            optimizer.load_state_dict(saved.state_dict())
            optimizer.step()
            return
        options = _options(optimizer)
        other = saver.name.removeprefix("Fused").removeprefix("Split")
        with refused(optimizer, ValueError, f"^{case.name}: the checkpoint is one of {other}, "):
            optimizer.load_state_dict(saved.state_dict())
        assert _options(optimizer) == options

    @pytest.mark.parametrize(
        ("case", "saver"), [*itertools.product(TORCHS_CASES, repeat=2)], ids=configuration_id
    )
    def test_load_of_another_class_by_torchs(
        self, case: OptimizerCase, saver: OptimizerCase
    ) -> None:
        """torch's classes load what ours refuse, and fail in the next step."""
        loaded, saved = (
            each.reference([Parameter(torch.randn(17))], lr=0.1) for each in (case, saver)
        )
        loaded.load_state_dict(saved.state_dict())
        fits = _kind_of_state(case) == _kind_of_state(saver)
        with contextlib.nullcontext() if fits else pytest.raises(KeyError):
            step_alike(loaded)

    @pytest.mark.parametrize("saver", [torch.optim.NAdam, torch.optim.RAdam])
    @pytest.mark.parametrize("case", ADAMS, ids=configuration_id)
    def test_load_of_adams_relatives(self, case: OptimizerCase, saver: Any) -> None:
        """State that is Adam's, and something more, is loaded."""
        saved = saver([Parameter(torch.randn(17))], lr=0.1)
        step_alike(saved)
        p, optimizer = single(case, "17")
        optimizer.load_state_dict(saved.state_dict())
        state = saved.state_dict()["state"][0]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][key], state[key])
        before = p.detach().clone()
        optimizer.step()
        assert optimizer.state[p]["step"] == 2
        assert not torch.equal(p, before)

    @each_class
    def test_load_without_some_of_the_state(self, case: OptimizerCase) -> None:
        _, optimizer = single(case, "17")
        optimizer.step()
        needed = [key for key in case.state_keys if key not in ("trail", "max_exp_avg_sq")]
        for key in needed if len(needed) > 1 else []:
            checkpoint = copy.deepcopy(optimizer.state_dict())
            checkpoint["param_groups"][0]["lr"] = 0.75
            del checkpoint["state"][0][key]
            options = _options(optimizer)
            with refused(optimizer, ValueError, f"has no '{key}' of parameter 0"):
                optimizer.load_state_dict(checkpoint)
            assert _options(optimizer) == options

    @each_case
    def test_group_added_again(self, case: OptimizerCase) -> None:
        """Parameters that are frozen for a while keep their state, and what users added to it."""
        params = [Parameter(torch.randn(10)) for _ in range(2)]
        optimizer = case.make([{"params": [p]} for p in params], **case.kwargs[-1])
        step_alike(optimizer)
        state = optimizer.state[params[1]]
        state |= {"mask": torch.ones(10, dtype=torch.bool), "buffer": None}
        before = dict(state)
        optimizer.add_param_group(optimizer.param_groups.pop())
        assert optimizer.state[params[1]] is state
        assert state.keys() == before.keys()
        assert all(state[key] is value for key, value in before.items())
        step_alike(optimizer)

    @each_class
    def test_what_is_no_state_of_a_parameter(self, case: OptimizerCase) -> None:
        """torch lets users keep anything in the state."""
        _, optimizer = single(case)
        optimizer.step()
        optimizer.state["epoch"] = 0
        checkpoint = through_a_file(optimizer.state_dict())
        assert checkpoint["state"]["epoch"] == 0
        other = copy.deepcopy(optimizer)
        other.state["epoch"] = 1
        other.load_state_dict(checkpoint)
        assert other.state["epoch"] == 0
        step_alike(optimizer, other)
        assert_same_bits(optimizer, other)

    @each_class
    def test_saved_by_several_threads(self, case: OptimizerCase) -> None:
        optimizer = case.make([Parameter(torch.randn(3)) for _ in range(50)], **case.kwargs[-1])
        step_alike(optimizer)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            run_in_threads(*[lambda: [optimizer.state_dict() for _ in range(50)]] * 3)
        finally:
            sys.setswitchinterval(interval)

    @each_class
    @each_way_to_copy
    def test_copies_are_independent(self, case: OptimizerCase, copied: Any) -> None:
        pair = SideBySide(case)
        pair.train()
        twin = copied(pair.ours)
        before = [p.detach().clone() for p in pair.params]
        step_alike(twin)
        assert all(map(torch.equal, pair.params, before))
        pair.train()
