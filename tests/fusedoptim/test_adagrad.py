"""What only FusedAdagrad does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from fusedoptim import FusedAdagrad
from tests.fusedoptim.helpers import SideBySide, values_after
from tests.optimizer_cases import ADAGRAD, configuration_id
from tests.tolerances import by_hand


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        # s = 0.25; p = 1 - 0.1 * 0.5 / 0.5 = 0.9
        # s = 0.25 + 1.44 = 1.69; p = 0.9 - 0.1 * 1.2 / 1.3
        ({}, [0.9, 0.9 - 0.12 / 1.3]),
        # It starts at the second step: p = 0.9
        # The rate is 0.1 / (1 + 1 * 0.25) = 0.08: p = 0.9 - 0.08 * 1.2 / 1.3
        ({"lr_decay": 0.25}, [0.9, 0.9 - 0.096 / 1.3]),
        # s = 0.11 + 0.25 = 0.36; p = 1 - 0.1 * 0.5 / 0.6 = 0.91666...
        # s = 0.36 + 1.44 = 1.8; p = 0.91666... - 0.12 / sqrt(1.8)
        ({"initial_accumulator_value": 0.11}, [1 - 0.05 / 0.6, 1 - 0.05 / 0.6 - 0.12 / 1.8**0.5]),
        # g = -0.5 + 0.2 * 1 = -0.3; s = 0.09; p = 1 + 0.1
        # g = -1.2 + 0.2 * 1.1 = -0.98; s = 0.09 + 0.9604; p = 1.1 + 0.098 / sqrt(1.0504)
        ({"weight_decay": 0.2, "maximize": True}, [1.1, 1.1 + 0.098 / 1.0504**0.5]),
    ],
    ids=configuration_id,
)
def test_by_hand(kwargs: dict[str, Any], expected: list[float]) -> None:
    """Two steps from 1.0 with gradients 0.5 and 1.2."""
    values = values_after(FusedAdagrad, [1.0], ([0.5], [1.2]), eps=0.0, **kwargs)
    assert values == by_hand(expected, 7)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.complex64, torch.complex64),
    ],
    ids=configuration_id,
)
def test_state_is_there_from_the_start(dtype: torch.dtype, expected: torch.dtype) -> None:
    """State exists for share_memory(), as torch's does; but it is never 16 bits wide."""
    p = Parameter(torch.randn(34, 10).to(dtype)[::2, 1::3])
    optimizer = FusedAdagrad([p], initial_accumulator_value=0.1)
    state = optimizer.state[p]
    assert set(state) == {"step", "sum"}
    assert (state["step"].shape, state["step"].dtype) == ((), torch.float32)
    value = 0.1 + 0.1j if dtype.is_complex else 0.1
    # 0.1 in float32, not rounded to 16 bits
    assert torch.equal(state["sum"], torch.full((17, 3), value, dtype=expected))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert state is optimizer.state[p]
    assert state["step"] == 1


def test_group_added_later() -> None:
    """A later group's state is made at its first step, with the optimizer's initial value."""
    pair = SideBySide(ADAGRAD, ADAGRAD.kwargs[-1], [Parameter(torch.randn(17)) for _ in range(2)])
    later = [Parameter(torch.randn(5)) for _ in range(2)]
    references = [Parameter(p.detach().double()) for p in later]
    for p, reference in zip(later, references):
        pair.ours.add_param_group({"params": [p]})
        pair.torchs.add_param_group({"params": [reference]})
        pair.params.append(p)
        pair.references.append(reference)
        pair.train(2)
    assert [int(pair.ours.state[p]["step"]) for p in pair.params] == [4, 4, 4, 2]


def test_group_with_an_initial_value_of_its_own() -> None:
    """torch ignores the group's initial value and uses the optimizer's."""
    results = []
    for cls in (FusedAdagrad, torch.optim.Adagrad):
        p, q = (Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
        optimizer = cls([p], lr=0.5, initial_accumulator_value=0.5)
        optimizer.add_param_group({"params": [q], "initial_accumulator_value": 8.0})
        q.grad = torch.ones_like(q)
        optimizer.step()
        results.append(optimizer.state[q]["sum"])
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)


def test_share_memory() -> None:
    pair = SideBySide(ADAGRAD, ADAGRAD.kwargs[-1], [Parameter(torch.randn(n)) for n in (17, 1000)])
    pair.train()
    pair.ours.share_memory()
    assert all(state["sum"].is_shared() for state in pair.ours.state.values())
    pair.train()
