"""A long step is taken or not, whatever happens meanwhile, on torch's threads and the driver's."""

from __future__ import annotations

import random

import pytest
import torch

import fusedoptim
from fusedoptim.launch import opencl
from tests.fusedoptim.helpers import run_in_threads
from tests.fusedoptim.launch.long_steps import is_in_region, long_step, many_params
from tests.interrupts import InterruptAt, interrupted


@pytest.fixture(autouse=True, params=["torch's threads", "the driver's"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "the driver's":
        monkeypatch.setattr(opencl, "team", lambda: None)


def test_steps_in_threads_of_their_own() -> None:
    """Steps work in threads that never ran a parallel region before, and that end."""
    made = [long_step() for _ in range(4)]
    run_in_threads(*(lambda o=optimizer: [o.step() for _ in range(20)] for _, optimizer in made))
    for param, _ in made:
        assert (param == -10).all()


def test_interrupted_wherever_python_looks_for_it() -> None:
    param, optimizer = long_step()
    optimizer.step()
    for n in range(1000):
        before = float(param.detach()[0, 0])
        torch.ones(1_000_000).add(1)
        with InterruptAt(n, "polls", within=fusedoptim, since="submit") as interrupt:
            optimizer.step()
        assert not is_in_region()
        assert torch.is_grad_enabled()
        after = float(param.detach()[0, 0])
        assert after in (before, before - 0.5)
        assert (param == after).all()
        if not interrupt.has_raised:
            break
    assert 3 < n < 1000


def test_autograd_sees_the_writes_of_many_parameters() -> None:
    params, optimizer = many_params()
    loss = torch.stack([(p * p).sum() for p in params]).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_interrupted_at_any_moment() -> None:
    param, optimizer = long_step(lr=0.0)

    def step(choose: random.Random) -> None:
        assert not is_in_region()
        assert torch.is_grad_enabled()
        torch.ones(1_000_000).add(1)
        optimizer.step()

    interrupted(step, count=500, most=1e-3)
    assert not is_in_region()
    optimizer.step()
    assert (param == 0).all()
