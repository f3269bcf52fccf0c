"""Copies for traces are as deepcopy makes them, but share tensors and have no hooks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from transforms.tracing.clones import clone


class Holder(nn.Module):
    """A module with attributes of many kinds, some of which its child has, too."""

    def __init__(self) -> None:
        super().__init__()
        self.child: Any = nn.Linear(2, 2)
        self.register_buffer("left_out", torch.ones(2), persistent=False)
        self.empty: list[Tensor] = []
        self.filled = [{"steps": 0}]
        self.parts = (self.child, self)
        for name in ("empty", "filled"):
            setattr(self.child, name, getattr(self, name))


class Own(nn.Linear):
    """A module that copies itself in its own way."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        memo[id(self)] = twin = Own(self.in_features, self.out_features)
        return twin


def test_attributes_are_copied_once_and_tensors_are_shared() -> None:
    model = Holder()
    twin, originals = clone(model)
    assert originals == {twin: model, twin.child: model.child}
    assert twin.parts == (twin.child, twin)
    for name in ("empty", "filled"):
        mine = getattr(twin, name)
        assert mine == getattr(model, name)
        assert mine is not getattr(model, name)
        assert mine is getattr(twin.child, name)
    assert twin.filled[0] is not model.filled[0]
    for one, other in zip(twin.state_dict(keep_vars=True).values(), model.parameters()):
        assert one is other
    assert twin.left_out is model.left_out
    twin.register_buffer("other", torch.ones(1), persistent=False)
    del twin.child.bias
    assert list(dict(model.named_buffers())) == ["left_out"]
    assert model.child.bias is not None
    assert model._non_persistent_buffers_set == {"left_out"}


def test_hooks_are_left_out() -> None:
    model = nn.Sequential(nn.ReLU())
    seen: list[object] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    twin, _ = clone(model)
    twin(torch.ones(1))
    assert not seen
    model(torch.ones(1))
    assert seen


def test_modules_with_copies_of_their_own() -> None:
    model = nn.Sequential(Own(2, 2), nn.Linear(2, 2))
    model[1].__deepcopy__ = lambda memo: memo.setdefault(id(model[1]), nn.ReLU())
    twin, originals = clone(model)
    assert twin[0].weight is not model[0].weight
    assert type(twin[1]) is nn.ReLU
    assert list(originals.values()) == [model, *model]


def test_compiled_calls_are_left_out_as_by_deepcopy() -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    assert clone(model)[0]._compiled_call_impl is copy.deepcopy(model)._compiled_call_impl is None
