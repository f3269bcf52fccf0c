"""Frozen BatchNorms of torchvision and detectron2 fold as torch's own do."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms


class FrozenBatchNorm2d(nn.Module):
    """A frozen BatchNorm like those libraries': all tensors are buffers."""

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        for name, values in (
            ("weight", torch.rand(num_features) + 0.5),
            ("bias", torch.randn(num_features)),
            ("running_mean", torch.randn(num_features)),
            ("running_var", torch.rand(num_features) + 0.5),
        ):
            self.register_buffer(name, values)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        bias = self.bias - self.running_mean * scale
        return x * scale.reshape(1, -1, 1, 1) + bias.reshape(1, -1, 1, 1)


@pytest.fixture(params=["torchvision.ops.misc", "detectron2.layers.batch_norm"], autouse=True)
def _library(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType(request.param)
    vars(library)["FrozenBatchNorm2d"] = FrozenBatchNorm2d
    monkeypatch.setitem(sys.modules, request.param, library)


def new_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), FrozenBatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1),
        FrozenBatchNorm2d(4),
    ).eval()  # fmt: skip


def test_folds_and_restores() -> None:
    model, x = new_model(), torch.randn(2, 3, 9, 9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimized = transforms.optimize(model, weights_prepack=False)
    assert [type(optimized[k]).__name__ for k in (1, 4)] == ["FoldedBatchNorm"] * 2
    expected = model.double()(x.double())
    torch.testing.assert_close(optimized(x).double(), expected, rtol=1e-4, atol=1e-4)
    for state in (optimized.state_dict(), transforms.restore(optimized).state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], before[name]) for name in before)
    assert type(optimized[1]) is FrozenBatchNorm2d


def test_checkpoint_is_loaded() -> None:
    optimized = transforms.optimize(new_model(), weights_prepack=False)
    other, x = new_model(), torch.randn(2, 3, 9, 9)
    optimized.load_state_dict(other.state_dict())
    torch.testing.assert_close(optimized(x), other(x), rtol=1e-4, atol=1e-4)


def test_written_weights_are_learned() -> None:
    """A changed bias goes to the norm's bias, which is a buffer."""
    optimized = transforms.optimize(new_model(), weights_prepack=False)
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        optimized[0].weight.mul_(1.25)
        optimized[0].bias.add_(0.5)
    expected = optimized(x)
    restored = transforms.restore(optimized)
    torch.testing.assert_close(restored(x), expected, rtol=1e-4, atol=1e-4)


def test_subclass_that_computes_something_else_is_left() -> None:
    class Doubled(FrozenBatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Doubled(8)).eval()
    optimized = transforms.optimize(model, weights_prepack=False)
    assert type(optimized[1]) is Doubled


class TestTraining:
    def test_computes_the_same(self) -> None:
        model = new_model().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimized, _ = transforms.optimize(model, optimizer)
        assert [type(optimized[k]).__name__ for k in (1, 4)] == ["FrozenBatchNorm"] * 2
        x = torch.randn(2, 3, 9, 9, requires_grad=True)
        results = [each(x) for each in (optimized, model)]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in results]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)

    def test_restores_and_loads(self) -> None:
        model = new_model().train()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimized, _ = transforms.optimize(model, optimizer)
        state = {**before, "1.num_batches_tracked": torch.tensor(3)}
        optimized.load_state_dict(state)
        restored = transforms.restore(optimized)
        assert type(restored[1]) is FrozenBatchNorm2d
        after = restored.state_dict()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)

    def test_knob(self) -> None:
        model = new_model().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimized, _ = transforms.optimize(model, optimizer, fuse_frozen_batch_norm=False)
        assert type(optimized[1]) is FrozenBatchNorm2d
