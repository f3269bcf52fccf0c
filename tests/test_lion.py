"""The example of a new optimizer, examples/lion.py, follows the paper's algorithm in float64."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

# An example imports its neighbors by their bare names, as a script does.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import lion
from lion import Lion

from tests.fusedoptim.helpers import assert_within
from tests.tolerances import Bounded, number


def algorithm_2(
    theta: Tensor, m: Tensor, g: Tensor, eta: float, beta1: float, beta2: float, lambda_: float
) -> tuple[Tensor, Tensor]:
    """One step of Lion as the paper writes it (Chen et al. 2023, algorithm 2)."""
    c = beta1 * m + (1 - beta1) * g
    theta = theta - eta * (torch.sign(c) + lambda_ * theta)
    m = beta2 * m + (1 - beta2) * g
    return theta, m


def _bounded(value: Tensor) -> Bounded:
    return Bounded(value.double(), 0.0, torch.float32)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_against_the_paper(weight_decay: float) -> None:
    """Steps agree with float64 within bounds, except where rounding decides the sign of c."""
    eta, betas = 0.1, (0.7, 0.9)
    sizes = [(1,), (15,), (3, 7), (40_000,), (0,), (1000, 100)]
    params = [Parameter(torch.randn(size)) for size in sizes]
    optimizer = Lion(params, lr=eta, betas=betas, weight_decay=weight_decay)
    exact = [(p.detach().double(), torch.zeros_like(p, dtype=torch.float64)) for p in params]
    bounds = [(_bounded(p.detach()), _bounded(torch.zeros_like(p))) for p in params]
    unclear = [torch.zeros(p.shape, dtype=torch.bool) for p in params]
    beta1, beta2, lr, decay = (number(v) for v in (*betas, eta, weight_decay))
    for _ in range(4):
        for k, p in enumerate(params):
            p.grad = torch.randn_like(p)
            theta, m = exact[k]
            exact[k] = algorithm_2(theta, m, p.grad.double(), eta, *betas, weight_decay)
            t, moment = bounds[k]
            g = _bounded(p.grad)
            c = beta1 * moment + (1 - beta1) * g
            unclear[k] |= c.value.abs() <= c.error
            sign = _bounded(torch.sign(c.value))
            bounds[k] = (t - lr * (sign + decay * t), beta2 * moment + (1 - beta2) * g)
        optimizer.step()
    for k, p in enumerate(params):
        known = ~unclear[k]
        assert known.double().mean().item() > 0.99 or not p.numel()
        t, moment = bounds[k]
        assert_within(p.detach()[known], exact[k][0][known], t.error[known], "theta")
        average = optimizer.state[p]["exp_avg"] if p.numel() else exact[k][1].float()
        assert_within(average, exact[k][1], moment.error, "exp_avg")


def test_first_step_by_hand() -> None:
    """From m = 0 the direction is the gradient's sign: 1 - 0.1 (sign + 0.5 * 1), and m = 0.01 g."""
    p = Parameter(torch.ones(4))
    p.grad = torch.tensor([3.0, -2.0, 0.0, float("nan")])
    Lion([p], lr=0.1, weight_decay=0.5).step()
    expected = torch.tensor([0.85, 1.05, 0.95, float("nan")])
    torch.testing.assert_close(p.detach(), expected, equal_nan=True)


def test_contract_of_torch() -> None:
    p, q, frozen = (Parameter(torch.randn(20)) for _ in range(3))
    p.grad, q.grad = torch.randn(20), torch.randn(20)
    before, version = frozen.detach().clone(), p._version
    optimizer = Lion([{"params": [p]}, {"params": [q, frozen], "lr": 0.5}], lr=0.1)
    assert optimizer.step(lambda: 7) == 7
    assert torch.equal(frozen, before)
    assert p._version > version
    torch.testing.assert_close(optimizer.state[q]["exp_avg"], 0.01 * q.grad)

    # An optimizer resumed from a checkpoint continues like the original.
    weights, state = p.detach().clone(), copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    r, s, t = Parameter(weights), Parameter(q.detach().clone()), Parameter(before)
    resumed = Lion([{"params": [r]}, {"params": [s, t]}])
    resumed.load_state_dict(state)
    r.grad = p.grad
    resumed.step()
    assert torch.equal(r, p)


@pytest.mark.parametrize(
    "kwargs", [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}]
)
def test_bad_numbers(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Lion([Parameter(torch.ones(1))], **kwargs)


@pytest.mark.parametrize(
    "p", [torch.ones(3, dtype=torch.float64), torch.ones(4, 4).t()[1:]], ids=["float64", "strided"]
)
def test_bad_tensors(p: Tensor) -> None:
    p = Parameter(p)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    with pytest.raises(ValueError, match="Lion takes contiguous float32 on the CPU"):
        Lion([p]).step()
    assert torch.equal(p, before)


def test_main(capsys: pytest.CaptureFixture[str]) -> None:
    """Lion learns the digits about as well as AdamW."""
    lion.main(epochs=8)
    lines = capsys.readouterr().out.splitlines()
    shares = [float(line.split("%")[0].split()[-1]) for line in lines]
    assert [line.split(":")[0].strip() for line in lines] == ["AdamW", "Lion"]
    assert shares[1] > shares[0] - 10
    assert shares[1] > 70
