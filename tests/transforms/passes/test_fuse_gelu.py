"""The pass that replaces approximate GELUs by ours."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from fusedoptim.nn import GELU
from tests.transforms.helpers import levels_of, optimized, optimized_twice
from transforms.rewrites.fused_activation import FusedActivation

KNOB = "fuse_gelu"


class Subclass(nn.GELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def model() -> nn.Sequential:
    """A GELU that is replaced and used twice, two with code of their own, and an exact one."""
    shared, own = nn.GELU("tanh"), nn.GELU("tanh")
    own.forward = torch.relu  # type: ignore[method-assign]  # what users do
    return nn.Sequential(nn.Linear(4, 4), shared, shared, Subclass("tanh"), own, nn.GELU())


def test_exchanges_plain_ones_and_reports_the_others() -> None:
    ours = optimized(model())
    assert [type(each) for each in ours][1:4] == [GELU, GELU, Subclass]
    assert type(ours[5]) is nn.GELU
    report = transforms.report(ours)
    assert [entry.where for entry in report.done(KNOB)] == ["1"]
    assert {entry.where: entry.what for entry in report.left(KNOB)} == {
        "3": "overrides GELU: Subclass may differ from it",
        "4": "overrides GELU: GELU may differ from it",
    }
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x), transforms.restore(ours)(x))


def test_levels_and_knob() -> None:
    for arguments, is_ours in levels_of(KNOB):
        assert (type(optimized(model(), **arguments)[1]) is GELU) == is_ours
    with pytest.raises(ValueError, match="fuse_gelu=True is for a model in train mode"):
        transforms.optimize(model().eval(), fuse_gelu=True)
    with pytest.warns(transforms.NoEffectWarning, match="fuse_gelu changed nothing"):
        optimized(nn.Linear(2, 2), fuse_gelu=True)


def test_twice_changes_nothing_more_and_restore_restores_every_bit() -> None:
    given = nn.Sequential(nn.Linear(4, 4), nn.GELU("tanh"), GELU("tanh")).train()
    seen: list[str] = []
    given[1].register_forward_hook(lambda *_: seen.append("after"))
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    with optimized_twice(given, optimizer):
        given(torch.ones(2, 4))
        assert seen == ["after"]
    assert [type(each) for each in given] == [nn.Linear, nn.GELU, GELU]


@torch.no_grad()
@pytest.mark.parametrize("prepare", [transforms.optimize, transforms.quantize])
def test_restored_after_training_and_inference(prepare: Callable[[nn.Module], Any]) -> None:
    plain = nn.Sequential(nn.Linear(256, 256), nn.GELU("tanh"), nn.Linear(256, 8))
    x = torch.randn(64, 256)
    trained = optimized(plain)
    assert type(trained[1]) is GELU
    ours = prepare(trained.eval())
    assert type(ours[1]) is FusedActivation
    ours(x)
    for each in (trained, ours):
        transforms.restore(each)
        assert [type(module) for module in each] == [type(module) for module in plain]
        assert [vars(module).keys() for module in each] == [vars(m).keys() for m in plain]
        assert torch.equal(each(x), plain(x))


class TestTransformers:
    @pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
    def test_exchanged_and_restored(self, name: str) -> None:
        activations = pytest.importorskip("transformers.activations")
        activation = activations.ACT2FN[name]
        kind, attributes = type(activation), dict(vars(activation))
        given = nn.Sequential(nn.Linear(600, 600), activation)
        ours = optimized(given)
        x = torch.randn(300, 600)
        assert type(ours[1]) is GELU
        torch.testing.assert_close(ours(x), given(x))
        for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert type(transforms.restore(twin)[1]) is kind
        restored = transforms.restore(ours)[1]
        assert type(restored) is kind
        assert vars(restored).keys() == attributes.keys()

    def test_exact_ones_stay(self) -> None:
        activations = pytest.importorskip("transformers.activations")
        ours = optimized(nn.Sequential(nn.Linear(2, 2), activations.ACT2FN["gelu"]))
        assert type(ours[1]) is activations.GELUActivation
        assert transforms.report(ours).left(KNOB) == []
