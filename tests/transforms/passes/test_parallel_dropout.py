"""The pass that exchanges torch's Dropouts for ours: which, how it is undone, and what is left."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fusedoptim import transforms
from fusedoptim.nn import Dropout
from tests.transforms.helpers import fingerprint

KNOB = "parallel_dropout"


class Subclass(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)


class Block(nn.Module):
    """A Dropout that is used twice, and one of each kind that is left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)
        self.shared = nn.Dropout(0.25)
        self.again = self.shared
        self.others = nn.Sequential(Subclass(0.1), nn.Dropout1d(0.1), nn.AlphaDropout(0.1))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.last(self.shared(self.first(x))))


def optimized(model: nn.Module, **arguments: Any) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: nn.Module = transforms.optimize(model.train(), optimizer, **arguments)[0]
    return result


def left(model: nn.Module) -> dict[str, str]:
    return {entry.where: entry.what for entry in transforms.report(model).left(KNOB)}


def test_exchanges_plain_dropouts_and_reports_the_others() -> None:
    model = optimized(Block())
    assert type(model.shared) is Dropout
    assert model.again is model.shared
    assert [entry.where for entry in transforms.report(model).done(KNOB)] == ["shared"]
    assert left(model) == {
        "others.0": "is not a plain torch.nn.Dropout: Subclass may differ from it",
        "others.1": "draws one number for each channel, which is quick",
        "others.2": "is not a plain torch.nn.Dropout: AlphaDropout may differ from it",
        "attention": "drops attention weights inside torch's function",
    }


def test_attention_of_the_users_own_is_reported() -> None:
    model = optimized(nn.Sequential(nn.Linear(4, 4), Attention(), nn.Dropout(0.1)))
    assert left(model) == {
        "1": "calls scaled_dot_product_attention, whose dropout, if any, stays torch's"
    }


def test_levels_and_knob() -> None:
    for arguments, is_ours in (
        ({}, True), ({KNOB: False}, False),
        ({"level": "O0"}, False), ({"level": "O0", KNOB: True}, True),
    ):  # fmt: skip
        assert (type(optimized(Block(), **arguments).shared) is Dropout) == is_ours
    with pytest.raises(ValueError, match="parallel_dropout=True is for a model in train mode"):
        transforms.optimize(Block().eval(), parallel_dropout=True)


def test_warns_where_there_is_nothing_to_exchange() -> None:
    with pytest.warns(transforms.NoEffectWarning, match="parallel_dropout changed nothing"):
        optimized(nn.Linear(2, 2), parallel_dropout=True)


def test_twice_changes_nothing_more_and_restore_restores_every_bit() -> None:
    model = Block().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, given = fingerprint(model), (model, optimizer)
    assert transforms.optimize(*given, inplace=True)[0] is model
    once, report = fingerprint(model), str(transforms.report(model))
    transforms.optimize(*given, inplace=True)
    assert (fingerprint(model), str(transforms.report(model))) == (once, report)
    transforms.restore(*given)
    assert fingerprint(model) == before
    assert type(model.shared) is nn.Dropout


def test_dropouts_that_are_ours_already_stay_ours() -> None:
    model = optimized(nn.Sequential(nn.Linear(2, 2), Dropout(0.1), nn.Dropout(0.1)))
    assert [entry.where for entry in transforms.report(model).done(KNOB)] == ["2"]
    transforms.restore(model)
    assert [type(module) for module in model] == [nn.Linear, Dropout, nn.Dropout]


def test_hooks_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    seen: list[str] = []
    model[1].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[1].register_forward_hook(lambda *_: seen.append("after"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    model = optimized(model, inplace=True)
    model(torch.ones(2, 4)).sum().backward()
    assert type(model[1]) is Dropout
    assert seen == ["before", "after", "backward"]


@pytest.mark.parametrize("kind", ["own forward", "parametrized"])
def test_changed_objects_are_left(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    dropout: Any = model[1]
    if kind == "own forward":
        dropout.forward = torch.relu
    else:
        dropout.scale = nn.Parameter(torch.ones(()))
        parametrize.register_parametrization(dropout, "scale", nn.Identity())
    changed = type(dropout)
    model = optimized(model, inplace=True)
    assert type(model[1]) is changed
    assert "is not a plain torch.nn.Dropout" in left(model)["1"]


def test_inference_afterwards_and_restored() -> None:
    """Undone in the opposite order: the Dropout is torch's again."""
    model = optimized(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    plain = transforms.optimize(model.eval(), inplace=True)
    assert isinstance(plain[1], nn.Identity)
    assert type(transforms.restore(plain)[1]) is nn.Dropout


def test_training_repeats_under_a_seed_and_copies() -> None:
    model = optimized(Block())
    twin = copy.deepcopy(model)
    x, outputs = torch.randn(5, 8), []
    for module in (model, model, twin):
        torch.manual_seed(3)
        outputs.append(module(x))
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert (outputs[0] == 0).any()
    assert torch.equal(model.eval()(x), transforms.restore(model)(x))
