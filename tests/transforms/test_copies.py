"""A model and its optimizer copied together."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.optimizer_cases import OptimizerCase
from tests.transforms.helpers import assert_same, each_class
from transforms.inputs.copies import copy_pair
from transforms.passes.fuse_step import fuse_update_step
from transforms.passes.split_weights import split_master_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.head(self.norm(self.embedding(tokens)))
        return logits

    def count(self, *_: Any) -> None:
        self.calls += 100


def _train(model: nn.Module, optimizer: Any, seed: int = 0, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(7, (16,), generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(tokens).float(), tokens)
        loss.backward()
        optimizer.step()


def _pair(case: OptimizerCase) -> tuple[Tied, Any]:
    model = Tied()
    groups = [{"params": [model.head.weight]}, {"params": list(model.norm.parameters()), "lr": 0.3}]
    optimizer = case.reference(groups, **case.kwargs[-1])
    _train(model, optimizer)
    return model, optimizer


def _snapshot(model: nn.Module, optimizer: Any) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@each_class
@pytest.mark.parametrize("optimized", ["plain", "fused", "split"])
def test_trains_as_the_original_would(case: OptimizerCase, optimized: str) -> None:
    model, optimizer = _pair(case)
    if optimized != "plain":
        fuse_update_step(optimizer)
    if optimized == "split":
        split_master_weights(model, optimizer)
        _train(model, optimizer)
    before = _snapshot(model, optimizer)
    twin, its = copy_pair(model, optimizer)
    assert isinstance(twin, Tied)
    assert twin.head.weight is twin.embedding.weight
    assert_same(_snapshot(twin, its), before)
    params = {id(p) for p in model.parameters()}
    assert {id(p) for g in its.param_groups for p in g["params"]} == {
        id(p) for p in twin.parameters()
    }
    assert not params & {id(p) for p in its.state}
    _train(twin, its, seed=1)
    assert_same(_snapshot(model, optimizer), before)
    _train(model, optimizer, seed=1)
    assert_same(_snapshot(model, optimizer), _snapshot(twin, its))


@each_class
def test_hooks(case: OptimizerCase) -> None:
    model, optimizer = _pair(case)
    seen: list[str] = []
    model.head.register_forward_hook(model.count)
    model.register_forward_pre_hook(lambda *_: seen.append("forward"))
    optimizer.register_step_post_hook(model.count)
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    weight, bias = model.head.weight, model.norm.bias
    weight.register_hook(lambda grad: seen.append("gradient"))
    bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    model.calls = 0
    twin, its = copy_pair(model, optimizer)
    _train(twin, its, steps=1)
    assert sorted(seen) == ["accumulated", "forward", "gradient", "step"]
    assert model.calls == 0
    assert twin.calls == 201
    _train(model, optimizer, steps=1)
    assert model.calls == twin.calls == 201


def test_gradients_and_attributes_of_parameters() -> None:
    model = nn.Linear(3, 2)
    model.weight.grad = torch.randn(2, 3)
    model.weight.no_decay = True  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin, _ = copy_pair(model, optimizer)
    weight: Any = twin.weight
    assert torch.equal(weight.grad, model.weight.grad)
    assert weight.grad is not model.weight.grad
    assert weight.no_decay is True


def test_strides_and_modes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout()).to(memory_format=torch.channels_last)
    model[1].eval()
    twin, nothing = copy_pair(model, None)
    assert nothing is None
    assert twin[0].weight.stride() == model[0].weight.stride()
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]


def test_what_a_class_keeps_in_the_object() -> None:
    """Where torch's deepcopy of an optimizer alone loses it."""

    class Halving(torch.optim.SGD):
        def __init__(self, params: Any, factor: Tensor) -> None:
            super().__init__(params, lr=0.1)
            self.factor = factor

    model = nn.Linear(3, 2)
    optimizer = Halving(model.parameters(), torch.tensor(0.5))
    assert not hasattr(copy.deepcopy(optimizer), "factor")
    _, its = copy_pair(model, optimizer)
    assert isinstance(its, Halving)
    assert its.factor == 0.5
    assert its.factor is not optimizer.factor


def test_scheduler_stays_with_the_original() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    _, its = copy_pair(model, optimizer)
    assert its is not None
    assert "step" not in vars(its)
    own = lr_scheduler.StepLR(its, 1)
    for o, s in ((optimizer, scheduler), (its, own)):
        o.step()
        s.step()
    assert optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"]


def test_model_that_copies_itself() -> None:
    class Own(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Own:
            twin = Own(self.in_features, self.out_features)
            twin.load_state_dict(self.state_dict())
            return twin

    model = Own(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin, its = copy_pair(model, optimizer)
    assert its is not None
    assert its.param_groups[0]["params"][0] is twin.weight


def test_model_that_cannot_be_copied() -> None:
    model = nn.Linear(3, 2)
    model.cached = model(torch.ones(3))  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"Linear or .* cannot be copied .*: pass inplace=True"):
        copy_pair(model, None)


def test_optimizer_that_cannot_be_copied() -> None:
    model = nn.Linear(3, 2)
    optimizer: Any = torch.optim.SGD(model.parameters())
    optimizer.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot be copied \(TypeError: .*: pass inplace=True"):
        copy_pair(model, optimizer)


def test_replaced_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    step = optimizer.step
    optimizer.step = lambda *args: step(*args)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"optimizer\.step was replaced"):
        copy_pair(model, optimizer)
