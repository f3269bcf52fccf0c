"""What only FusedAdam and FusedAdamW do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedAdam, FusedAdamW
from tests.fusedoptim.helpers import (
    SideBySide,
    assert_same_bits,
    make_params,
    step_alike,
    values_after,
)
from tests.optimizer_cases import ADAM, ADAMW, OptimizerCase, configuration_id
from tests.tolerances import by_hand

each_case = pytest.mark.parametrize("case", [ADAM, ADAMW], ids=configuration_id)


@pytest.mark.parametrize(
    ("cls", "kwargs", "expected"),
    [
        # m = 0.25, over 0.5: 0.5; v = 0.0625, over 0.25: 0.25; p = 1 - 0.1 * 0.5 / 0.5
        # m = 0.125 + 0.125 = 0.25, over 0.75: 1/3
        # v = 0.046875 + 0.015625 = 0.0625, over 0.4375: 1/7; p = 0.9 - 0.1 * sqrt(7) / 3
        (FusedAdam, {}, [0.9, 0.9 - 0.1 * 7**0.5 / 3]),
        (FusedAdamW, {"weight_decay": 0.0}, [0.9, 0.9 - 0.1 * 7**0.5 / 3]),
        # The other way
        (FusedAdam, {"maximize": True}, [1.1, 1.1 + 0.1 * 7**0.5 / 3]),
        # g = 0.5 + 0.5 * 1 = 1; p = 1 - 0.1 = 0.9
        # g = 0.25 + 0.5 * 0.9 = 0.7; m = 0.25 + 0.35 = 0.6, over 0.75: 0.8
        # v = 0.1875 + 0.1225 = 0.31, over 0.4375; p = 0.9 - 0.08 / sqrt(0.31 / 0.4375)
        (FusedAdam, {"weight_decay": 0.5}, [0.9, 0.9 - 0.08 / (0.31 / 0.4375) ** 0.5]),
        # p = 1 * (1 - 0.1 * 0.5) - 0.1 = 0.85; p = 0.85 * 0.95 - 0.1 * sqrt(7) / 3
        (FusedAdamW, {"weight_decay": 0.5}, [0.85, 0.8075 - 0.1 * 7**0.5 / 3]),
        (
            FusedAdam,
            {"weight_decay": 0.5, "decoupled_weight_decay": True},
            [0.85, 0.8075 - 0.1 * 7**0.5 / 3],
        ),
    ],
    ids=configuration_id,
)
def test_by_hand(cls: Any, kwargs: dict[str, Any], expected: list[float]) -> None:
    """Two steps from 1.0 with gradients 0.5 and 0.25, betas of 0.5 and 0.75, in float64."""
    options = {"betas": (0.5, 0.75), "eps": 0.0} | kwargs
    assert values_after(cls, [1.0], ([0.5], [0.25]), **options) == by_hand(expected, 7)


def test_amsgrad_keeps_the_largest() -> None:
    p = Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = FusedAdam([p], lr=0.1, betas=(0.0, 0.5), eps=0.0, amsgrad=True)
    for grad, largest in ((2.0, 2.0), (0.0, 2.0), (4.0, 8.5), (1.0, 8.5)):
        # v = 2; 1; 8.5; 4.75
        p.grad = torch.tensor([grad], dtype=torch.float64)
        before = p.item()
        optimizer.step()
        t = int(optimizer.state[p]["step"])
        assert optimizer.state[p]["max_exp_avg_sq"].item() == largest
        step = 0.1 * grad / (largest / (1 - 0.5**t)) ** 0.5
        assert p.item() == by_hand(before - step, 7)


class TestSmallBetas:
    """At a beta1 below 1/2, most of the average is the newest gradient."""

    def test_after_a_spike_by_hand(self) -> None:
        # m = 0 * m + g and v = 0 * v + g^2, so each step is p - 0.1 * g / |g|
        for dtype in (torch.float32, torch.float64):
            p = Parameter(torch.tensor([1.0], dtype=dtype))
            optimizer = FusedAdam([p], lr=0.1, betas=(0.0, 0.0), eps=0.0)
            for grad, expected in ((1e9, 0.9), (1e-2, 0.8), (-1e-9, 0.9)):
                p.grad = torch.tensor([grad], dtype=dtype)
                optimizer.step()
                assert optimizer.state[p]["exp_avg"].item() == p.grad.item()
                assert p.item() == by_hand(expected, 8, dtype)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("amsgrad", [False, True])
    @each_case
    def test_any_betas(self, case: OptimizerCase, amsgrad: bool, dtype: torch.dtype) -> None:
        # Multiples of 2^-30: torch computes 1 - (1 - beta1), which is beta1 only without rounding.
        unit = 2.0**-30
        edges = [(0.0, 0.0), (unit, 0.5), (0.25, 0.0), (0.5, 0.5), (0.5 + unit, 0.75)]
        drawn = (torch.randint(2**30, (3, 2)).double() * unit).tolist()
        for betas in [*edges, *map(tuple, drawn)]:
            kwargs = {"lr": 0.1, "betas": betas, "weight_decay": 0.1, "amsgrad": amsgrad}
            pair = SideBySide(case, kwargs, make_params(dtype, ["1000", "strided"]))
            for scale in (1.0, 1e9, 1e-2, 1.0):
                pair.set_gradients()
                for p, reference in zip(pair.params, pair.references):
                    assert p.grad is not None
                    assert reference.grad is not None
                    reference.grad.copy_(p.grad.mul_(scale))
                pair.check()


@each_case
def test_amsgrad_switched_on_later(case: OptimizerCase) -> None:
    pair = SideBySide(case, {"lr": 0.1}, make_params(torch.float32, ["17", "1000"]))
    pair.train()
    # torch expects this state to exist.
    for optimizer in (pair.ours, pair.torchs):
        optimizer.param_groups[0]["amsgrad"] = True
    for state in pair.torchs.state.values():
        state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])
    pair.train(2)


@each_case
def test_step_set_by_the_user(case: OptimizerCase) -> None:
    """A count may be set in place, as a new tensor or memory, or as old checkpoints' number."""
    params = [Parameter(torch.randn(5)) for _ in range(3)]
    pair = SideBySide(case, params=params)
    for count in (torch.tensor(40.0), torch.tensor(7.0, dtype=torch.float64)):
        pair.train()
        for optimizer, ps in ((pair.ours, pair.params), (pair.torchs, pair.references)):
            optimizer.state[ps[0]]["step"].fill_(12)
            optimizer.state[ps[1]]["step"] = count.clone()
        pair.train()
    for optimizer, ps in ((pair.ours, pair.params), (pair.torchs, pair.references)):
        optimizer.state[ps[0]]["step"].data = torch.tensor(5.0)
        optimizer.state[ps[2]]["step"].set_(torch.tensor(9.0))
    pair.train()
    pair.ours.state[params[0]]["step"] = 3
    pair.torchs.state[pair.references[0]]["step"] = torch.tensor(3.0)
    pair.train()
    assert isinstance(pair.ours.state[params[0]]["step"], torch.Tensor)


@each_case
def test_a_count_is_of_one_parameter(case: OptimizerCase) -> None:
    """The counts are views of one tensor; writing to one leaves the others unchanged."""
    params = [Parameter(torch.randn(5)) for _ in range(3)]
    optimizer = case.make(params, lr=0.1)
    step_alike(optimizer)
    ours = optimizer.state[params[1]]["step"]
    before = ours.clone()
    ours += 1
    assert optimizer.state[params[0]]["step"] == before
    assert optimizer.state[params[2]]["step"] == before


def test_betas_of_tensors_are_read_at_each_step() -> None:
    betas = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.75, dtype=torch.float64)]
    pair = SideBySide(ADAM, {"lr": 0.1, "betas": tuple(betas)}, make_params(torch.float32, ["17"]))
    for value in (0.5, 0.9):
        for beta in betas:
            beta.fill_(value)
        pair.train()


def test_adamw_is_adam_with_decoupled_weight_decay() -> None:
    p = torch.randn(1000)
    adamw = FusedAdamW([Parameter(p.clone())], lr=0.1, weight_decay=0.5)
    adam = FusedAdam([Parameter(p)], lr=0.1, weight_decay=0.5, decoupled_weight_decay=True)
    for _ in range(3):
        step_alike(adamw, adam)
    assert_same_bits(adamw, adam)
