"""A model with split weights whose move is interrupted keeps each weight, split or whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fusedoptim import transforms
from tests.fusedoptim.helpers import bits
from tests.transforms.helpers import interrupts_of
from tests.transforms.rewrites.test_moves import MOVES, Move
from transforms.rewrites.split import halves_in


def _split() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = transforms.optimize(model, optimizer, dtype=torch.bfloat16, inplace=True)
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    return model, optimizer


@pytest.mark.parametrize("name", ["bfloat16", "double", "share_memory", "to(device)"])
def test_interrupted(name: str) -> None:
    move: Move = MOVES[name]
    plain = copy.deepcopy(transforms.restore(*_split())[0])
    before = dict(plain.named_parameters())
    after = dict(move(copy.deepcopy(plain)).named_parameters())
    pair: list[Any] = []

    def prepare() -> None:
        pair[:] = _split()

    for _ in interrupts_of(lambda: move(pair[0]), prepare, since="_move", every=2):
        model, optimizer = pair
        halves = {p: each for each in halves_in(model) for p in each}
        for key, p in model.named_parameters():
            if p in halves and p.dtype == torch.bfloat16:
                exact = bits(halves[p].exact(p))
                known = before[key], after[key].float()
                assert any(torch.equal(exact, bits(values)) for values in known)
            else:
                assert p not in halves
                assert torch.equal(bits(p), bits(after[key]))
            assert p.grad is not None
            assert p.grad.dtype == p.dtype
        transforms.restore(model, optimizer)
        assert all(p.dtype in (torch.float32, after[n].dtype) for n, p in model.named_parameters())
