"""A model and its optimizer copied together."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusedoptim import transforms
from tests.optimizer_cases import OptimizerCase
from tests.transforms.helpers import assert_same, each_class, train
from tests.transforms.models import small
from transforms.inputs.copies import copy_pair
from transforms.passes.fuse_step import fuse_update_step
from transforms.passes.split_weights import split_master_weights


class Tied(nn.Sequential):
    """A model in which two layers share a weight."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(*small(), nn.Linear(2, 2), nn.Linear(2, 2))
        self[6].weight = self[5].weight

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)

    def count(self, *_: Any) -> None:
        self.calls += 100


def _pair(case: OptimizerCase) -> tuple[Tied, Any]:
    model = Tied()
    others = [p for p in model.parameters() if p is not model[6].weight]
    groups = [{"params": [model[6].weight]}, {"params": others, "lr": 0.3}]
    optimizer = case.reference(groups, **case.kwargs[-1])
    train(model, optimizer)
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
        train(model, optimizer)
    before = _snapshot(model, optimizer)
    twin, its = copy_pair(model, optimizer)
    assert isinstance(twin, Tied)
    assert twin[6].weight is twin[5].weight
    assert_same(_snapshot(twin, its), before)
    params = {id(p) for p in model.parameters()}
    assert {id(p) for g in its.param_groups for p in g["params"]} == {
        id(p) for p in twin.parameters()
    }
    assert not params & {id(p) for p in its.state}
    train(twin, its, seed=1)
    assert_same(_snapshot(model, optimizer), before)
    train(model, optimizer, seed=1)
    assert_same(_snapshot(model, optimizer), _snapshot(twin, its))


@each_class
def test_hooks(case: OptimizerCase) -> None:
    model, optimizer = _pair(case)
    seen: list[str] = []
    model[6].register_forward_hook(model.count)
    model.register_forward_pre_hook(lambda *_: seen.append("forward"))
    optimizer.register_step_post_hook(model.count)
    optimizer.register_step_pre_hook(lambda *_: seen.append("step"))
    weight, bias = model[6].weight, model[1].bias
    weight.register_hook(lambda grad: seen.append("gradient"))
    bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    model.calls = 0
    twin, its = copy_pair(model, optimizer)
    train(twin, its, steps=1)
    assert sorted(seen) == ["accumulated", "forward", "gradient", "step"]
    assert model.calls == 0
    assert twin.calls == 201
    train(model, optimizer, steps=1)
    assert model.calls == twin.calls == 201


def test_parameters_strides_and_modes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout()).to(memory_format=torch.channels_last)
    model[1].eval()
    weight: Any = model[0].weight
    weight.grad = torch.randn_like(weight)
    weight.no_decay = True
    twin, nothing = copy_pair(model, None)
    assert nothing is None
    its: Any = twin[0].weight
    assert torch.equal(its.grad, weight.grad)
    assert its.grad is not weight.grad
    assert its.no_decay is True
    assert its.stride() == weight.stride()
    assert [m.training for m in twin.modules()] == [m.training for m in model.modules()]


def test_what_a_class_keeps_in_the_object() -> None:
    """A class's own attributes are copied, which torch's deepcopy of an optimizer alone loses."""

    class Halving(torch.optim.SGD):
        def __init__(self, params: Any, factor: Tensor) -> None:
            super().__init__(params, lr=0.1)
            self.factor = factor
            self.known = [p for group in self.param_groups for p in group["params"]]

    model = nn.Linear(3, 2)
    optimizer = Halving(model.parameters(), torch.tensor(0.5))
    assert not hasattr(copy.deepcopy(optimizer), "factor")
    twin, its = copy_pair(model, optimizer)
    assert isinstance(its, Halving)
    assert its.factor == 0.5
    assert its.factor is not optimizer.factor
    assert list(map(id, its.known)) == list(map(id, twin.parameters()))


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


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_scripted_module() -> None:
    """torch's copy of a scripted module has cloned results as parameters, which get no gradient."""
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 2)))
    model[1].bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    twin, its = copy_pair(model, optimizer)
    assert its is not None
    x = torch.randn(5, 3)
    for each, stepping in ((model, optimizer), (twin, its)):
        each(x).square().sum().backward()
        stepping.step()
    assert_same(dict(twin.state_dict()), dict(model.state_dict()))


def _holds_a_result(model: Any, optimizer: Any) -> None:
    model.cached = model(torch.ones(3))


def _holds_a_lock(model: Any, optimizer: Any) -> None:
    optimizer.lock = threading.Lock()


def _steps_otherwise(model: Any, optimizer: Any) -> None:
    step = optimizer.step
    optimizer.step = lambda *args: step(*args)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_holds_a_result, TypeError, r"Linear or .* cannot be copied .*: pass inplace=True"),
        (_holds_a_lock, TypeError, r"cannot be copied \(TypeError: .*: pass inplace=True"),
        (_steps_otherwise, RuntimeError, r"optimizer\.step was replaced"),
    ],
)
def test_what_cannot_be_copied(change: Any, error: Any, message: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters())
    change(model, optimizer)
    with pytest.raises(error, match=message):
        copy_pair(model, optimizer)
    if error is TypeError:
        transforms.optimize(model, optimizer, inplace=True)
