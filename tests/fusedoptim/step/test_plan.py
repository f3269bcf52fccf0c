"""What a step reuses from the one before equals what it would compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedAdam, FusedSGD
from fusedoptim.step import dense
from fusedoptim.step.unchanged import RUN
from tests.fusedoptim.helpers import SideBySide, make_params
from tests.optimizer_cases import ADAM, SGD
from tests.tolerances import by_hand


def _write_into_rate(group: dict[str, Any]) -> None:
    if not isinstance(group["lr"], torch.Tensor):
        group["lr"] = torch.tensor(0.125, dtype=torch.float64)
    group["lr"] *= 0.5


def _write_into_betas(group: dict[str, Any]) -> None:
    if not isinstance(group["betas"][0], torch.Tensor):
        group["betas"] = tuple(torch.tensor(beta, dtype=torch.float64) for beta in (0.875, 0.75))
    group["betas"][0].mul_(0.5)


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "replaced rate": lambda group: group.update(lr=0.5 * float(group["lr"])),
    "narrow rate": lambda group: group.update(lr=np.float32(0.0625)),
    "written into rate": _write_into_rate,
    "written into betas": _write_into_betas,
    "direction": lambda group: group.update(maximize=not group["maximize"]),
    "kernels": lambda group: group.update(amsgrad=not group["amsgrad"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_hyper_parameter(change: str) -> None:
    kwargs = {"lr": 0.125, "amsgrad": True}
    pair = SideBySide(ADAM, kwargs, make_params(torch.float32, ["17", "strided"]))
    for step in range(6):
        if step % 2:  # the step after a change reuses what was read
            for optimizer in (pair.ours, pair.torchs):
                CHANGES[change](optimizer.param_groups[0])
        pair.train()
    pair.assert_equal()


@pytest.mark.parametrize(("lr", "reads"), [(0.1, 2), (torch.tensor(0.1), 5)])
def test_only_what_may_change_is_read_again(
    lr: Any, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors are read at each step; numbers at the first two, as the first may make state."""
    calls: list[dict[str, Any]] = []
    numbers = FusedSGD._numbers
    monkeypatch.setattr(
        FusedSGD, "_numbers", lambda self, group: calls.append(group) or numbers(self, group)
    )
    p = Parameter(torch.ones(3))
    optimizer = FusedSGD([p], lr=lr)
    for _ in range(5):
        p.grad = torch.ones(3)
        optimizer.step()
    assert len(calls) == reads
    assert p.tolist() == by_hand([0.5] * 3, 10, torch.float32)


def test_refused_number_is_read_again() -> None:
    p = Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = FusedAdam([p], lr=0.1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = float("nan")
    before = p.detach().clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="lr is nan"):
            optimizer.step()
    assert torch.equal(p, before)


def test_gradient_of_another_order_where_the_last_one_was() -> None:
    """A gradient's new memory may be at the address of the last gradient."""
    pair = SideBySide(SGD, {"lr": 0.125, "momentum": 0.5}, [Parameter(torch.randn(40, 50))])
    (p,), (reference,) = pair.params, pair.references
    for _ in range(20):
        p.grad = None
        p.grad = torch.randn(50, 40).t()
        reference.grad = p.grad.double()
        pair.step()
    pair.assert_equal()


def test_memory_swapped_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another thread swaps memory during a step that makes state, the next step notices."""
    p = Parameter(torch.zeros(100))
    optimizer = FusedSGD([p], lr=1.0, momentum=0.5)
    p.grad = torch.ones(100)
    commit = dense.DenseRows._add_state

    def swap(self: Any, *arguments: Any) -> None:
        p.data = torch.full((100,), 7.0)
        commit(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dense.DenseRows, "_add_state", swap)
        optimizer.step()
    optimizer.step()
    assert p.unique().tolist() == [5.5]


def test_more_tensors_than_are_read_together() -> None:
    """A swapped tensor beyond the first run is noticed."""
    params = [Parameter(torch.randn(3)) for _ in range(2 * RUN + 1)]
    pair = SideBySide(SGD, {"lr": 0.125, "momentum": 0.5}, params)
    for step in range(4):
        pair.set_gradients()
        if step == 1:
            state = pair.ours.state[params[-1]]
            state["momentum_buffer"] = state["momentum_buffer"].clone()
        if step == 2:
            params[RUN].data = params[RUN].detach().clone()
        if step == 3:
            params[RUN].grad = pair.references[RUN].grad = None
        pair.check()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_state_taken_away(steps: int) -> None:
    """The update starts over without its state, however many steps were taken."""
    pair = SideBySide(SGD, {"lr": 0.125, "momentum": 0.5}, make_params(torch.float32, ["17"]))
    for _ in range(2):
        pair.train(steps)
        for optimizer in (pair.ours, pair.torchs):
            optimizer.state.clear()
    pair.train()
