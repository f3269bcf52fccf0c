"""Calls of torch's functions that optimize leaves, and reports: dropout and approximate GELU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from fusedoptim.nn import functional
from tests.transforms.helpers import optimized


def left(model: nn.Module, knob: str) -> dict[str, str]:
    return {entry.where: entry.what for entry in transforms.report(model).left(knob)}


class ByFunctions(nn.Module):
    """Drops by a function of torch that it, a method or another function calls."""

    def __init__(self, plain: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5) if plain else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropped(self.dropout(self.linear(x)))

    def dropped(self, x: Tensor) -> Tensor:
        return dropped(x, self.training)


def dropped(x: Tensor, training: bool) -> Tensor:
    return nn.functional.dropout(torch.alpha_dropout(x, 0.5, training), 0.5, training)


class ByOurs(nn.Module):
    """Calls our functions, and passes torch's to another, which may not call it."""

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(functional.gelu(x, "tanh"), 0.5, self.training)
        return chosen(x, nn.functional.dropout)


def chosen(x: Tensor, other: Any) -> Tensor:
    return functional.dropout(x, 0.5) if x.dim() else other(x)


def test_functions_that_drop_are_reported() -> None:
    model = optimized(nn.Sequential(ByFunctions(), ByOurs(), nn.Linear(4, 4)))
    assert left(model, "parallel_dropout") == {
        "0": "calls torch.nn.functional.dropout and torch.alpha_dropout, whose dropout, if any, "
        "stays torch's"
    }
    assert left(model, "fuse_gelu") == {}
    with pytest.warns(transforms.NoEffectWarning, match=r"calls torch\.nn\.functional\.dropout"):
        optimized(ByFunctions(plain=False), parallel_dropout=True)


class Exact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))


class Approximate(Exact):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x), approximate="tanh")


def test_a_call_of_torchs_function_is_reported() -> None:
    ours = optimized(nn.Sequential(Approximate(), Exact(), nn.GELU("tanh")))
    what = "calls torch.nn.functional.gelu(approximate='tanh'), which stays torch's"
    assert left(ours, "fuse_gelu") == {"0": what}
    with pytest.warns(transforms.NoEffectWarning, match="calls torch.nn.functional.gelu"):
        optimized(Approximate(), fuse_gelu=True)
