"""torch.jit.script compiles a plain copy of a rewritten model, and leaves the model as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusedoptim import nn as ours
from fusedoptim import transforms
from tests.transforms.helpers import (
    assert_right,
    assert_same_state,
    copied,
    randomise,
)
from transforms.rewrites.onednn_products import OneDNNLinear

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")


def make() -> nn.Sequential:
    """A model with layers of all kinds that scripting replaces in inference, one of them twice."""
    shared = nn.Linear(512, 512)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 512)
    return nn.Sequential(nn.Sequential(*layers), nn.SiLU(), shared, nn.GELU(), shared)


def outside(model: nn.Module) -> list[Any]:
    """What scripting must not change: modules, their classes, and what their attributes hold."""
    return [
        (name, id(module), type(module), key, id(value))
        for name, module in model.named_modules(remove_duplicate=False)
        for attributes in (vars(module), module._modules, module._parameters, module._buffers)
        for key, value in attributes.items()
        if not key.startswith("__")  # torch's own notes
    ]


@pytest.mark.parametrize("part", ["model", "part", "wrapper"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@torch.no_grad()
def test_an_optimized_model_stays(part: str, dtype: torch.dtype | None) -> None:
    x, model = torch.randn(2, 3, 10, 10), randomise(make())
    plain = copied(model.state_dict())
    optimized = transforms.optimize(model, dtype=dtype)
    optimized(x) if dtype is None else None  # packs
    given = {"model": optimized, "part": optimized[0], "wrapper": nn.Sequential(optimized)}[part]
    before, report = outside(given), str(transforms.report(optimized))
    scripted = torch.jit.script(given)
    assert outside(given) == before
    assert str(transforms.report(optimized)) == report
    assert_same_state(optimized.state_dict(), plain)
    if dtype is None:
        assert_right(scripted, model[0] if part == "part" else model, x)
    transforms.restore(optimized)
    assert_same_state(optimized.state_dict(), plain)
    assert [type(m) for m in optimized.modules()] == [type(m) for m in model.modules()]
    nn.Parameter(optimized[0][0].weight)  # which is not watched any more


def test_a_refused_script_leaves_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transforms.rewrites.onednn_products.objection", lambda: None)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)))
    pair = model, torch.optim.SGD(model.parameters())
    optimized, _ = transforms.optimize(*pair)
    assert type(optimized[0]) is OneDNNLinear
    assert type(optimized[1][1]) is ours.Dropout
    before = outside(optimized)
    with pytest.raises(TypeError, match="Dropout, which calls kernels"):
        torch.jit.script(optimized)
    assert outside(optimized) == before


def test_other_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the function of torch that we replace, scripting raises and changes nothing."""
    from torch.jit import _script

    from transforms.rewrites import scripting

    assert _script.call_prepare_scriptable_func is scripting._prepare_copy
    monkeypatch.setattr(_script, "call_prepare_scriptable_func", scripting._prepare)
    model = transforms.optimize(make().eval())
    before = outside(model)
    with pytest.raises(
        RuntimeError, match=r"PackedConv2d cannot be scripted: call transforms\.res"
    ):
        torch.jit.script(model)
    assert outside(model) == before


def test_models_that_were_not_optimized_script_as_before() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    before = outside(model)
    assert torch.equal(torch.jit.script(model)(x), model(x))
    assert outside(model) == before
