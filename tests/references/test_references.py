"""The references equal torch.optim in float64; Lamb's hand numbers are in test_lamb.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from tests.optimizer_cases import Kwargs, configuration_id
from tests.references import adagrad, adam, lamb, sgd
from tests.references.lamb import ReferenceLamb

STEPS = 5
# Both sides round each operation, of which a step has less than 16, and the host's powers add a
# few hundred units in the first steps of Adam, as 1 - 0.999^t is small (tests/tolerances.py).
TOLERANCE = STEPS * 1024 * torch.finfo(torch.float64).eps


def _options(**values: tuple[Any, ...]) -> Iterator[Kwargs]:
    """Yield every combination of the values."""
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen))


SGD = [
    kwargs
    for kwargs in _options(
        lr=(0.1,),
        momentum=(0, 0.9),
        dampening=(0, 0.5),
        weight_decay=(0, 0.1),
        nesterov=(False, True),
        maximize=(False, True),
    )
    if not kwargs["nesterov"] or (kwargs["momentum"] and not kwargs["dampening"])
]
ADAGRAD = _options(
    lr=(0.1,),
    lr_decay=(0, 0.5),
    weight_decay=(0, 0.1),
    initial_accumulator_value=(0, 0.5),
    eps=(1e-10, 0.1),
    maximize=(False, True),
)
ADAM = _options(
    lr=(0.1,),
    betas=((0.9, 0.999), (0.0, 0.5)),
    eps=(1e-8, 0.1),
    weight_decay=(0, 0.1),
    amsgrad=(False, True),
    maximize=(False, True),
    decoupled_weight_decay=(False, True),
)
ADAMW = _options(
    lr=(0.1,),
    weight_decay=(0, 0.1),
    amsgrad=(False, True),
    maximize=(False, True),
)


def _adamw(*args: Any, **kwargs: Any) -> Tensor:
    return adam.step(*args, decoupled_weight_decay=True, **kwargs)


@pytest.mark.parametrize(
    ("algorithm", "torchs", "kwargs"),
    [
        *((sgd.step, torch.optim.SGD, kwargs) for kwargs in SGD),
        *((adagrad.step, torch.optim.Adagrad, kwargs) for kwargs in ADAGRAD),
        *((adam.step, torch.optim.Adam, kwargs) for kwargs in ADAM),
        *((_adamw, torch.optim.AdamW, kwargs) for kwargs in ADAMW),
    ],
    ids=configuration_id,
)
def test_equals_torchs(
    algorithm: Callable[..., Tensor], torchs: type[torch.optim.Optimizer], kwargs: Kwargs
) -> None:
    theta = torch.randn(20, dtype=torch.float64)
    p = Parameter(theta.clone())
    optimizer = torchs([p], foreach=False, **kwargs)  # type: ignore[call-arg]
    state: dict[str, Tensor] = {}
    for t in range(1, STEPS + 1):
        grad = torch.randn(20, dtype=torch.float64)
        grad += grad.sign()  # a gradient near zero, divided by its size, has no meaning
        p.grad = grad.clone()
        before = theta.clone()
        new = algorithm(theta, grad, state, t, **kwargs)
        assert torch.equal(theta, before)
        assert torch.equal(grad, p.grad)
        theta = new
        optimizer.step()
        torch.testing.assert_close(theta, p.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    expected = {k: v for k, v in optimizer.state[p].items() if k != "step" and v is not None}
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=TOLERANCE, atol=TOLERANCE)


class TestLamb:
    def test_equals_adam_without_its_ratio(self) -> None:
        theta = torch.randn(20, dtype=torch.float64)
        lambs, adams = theta, theta
        states: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        for t in range(1, STEPS + 1):
            grad = torch.randn(20, dtype=torch.float64)
            lambs = lamb.step(lambs, grad, states[0], t, lr=0.1, always_adapt=False)
            adams = adam.step(adams, grad, states[1], t, lr=0.1)
        assert torch.equal(lambs, adams)

    def test_ratio_makes_the_step_as_long_as_the_parameter(self) -> None:
        theta, grad = torch.randn(2, 20, dtype=torch.float64)
        new = lamb.step(theta, grad, {}, 1, lr=0.1, weight_decay=0.3)
        torch.testing.assert_close((new - theta).norm(), 0.1 * theta.norm())

    def test_driver_steps_each_parameter_by_itself(self) -> None:
        params = [Parameter(torch.randn(n, dtype=torch.float64)) for n in (3, 5, 7)]
        optimizer = ReferenceLamb(
            [{"params": params[:2]}, {"params": params[2:], "lr": torch.tensor(0.5)}], lr=0.25
        )
        expected = [p.detach().clone() for p in params]
        states: list[dict[str, Tensor]] = [{} for _ in params]
        for t in (1, 2, 3):
            for i, (p, lr) in enumerate(zip(params, (0.25, 0.25, 0.5))):
                p.grad = torch.randn_like(p)
                expected[i] = lamb.step(expected[i], p.grad, states[i], t, lr=lr)
            optimizer.step()
        for p, value, state in zip(params, expected, states):
            assert torch.equal(p, value)
            assert optimizer.state[p].pop("step") == 3
            assert optimizer.state[p].keys() == state.keys()

    def test_driver_takes_the_parts_of_a_complex_number_for_reals(self) -> None:
        p = Parameter(torch.randn(5, dtype=torch.complex128))
        q = Parameter(torch.view_as_real(p.detach()).clone())
        p.grad = torch.randn_like(p)
        q.grad = torch.view_as_real(p.grad).clone()
        ReferenceLamb([p], lr=0.1).step()
        ReferenceLamb([q], lr=0.1).step()
        assert torch.equal(torch.view_as_real(p.detach()), q)
