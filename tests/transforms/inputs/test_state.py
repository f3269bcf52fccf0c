"""Calls with samples leave what a model's forward counts and caches as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

from fusedoptim import transforms
from tests.transforms.helpers import assert_same
from transforms.inputs.state import put_back


class Counting(nn.Module):
    """Counts its calls, and caches values, in all kinds of attributes."""

    count: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("replaced", torch.ones(2))
        self.seen = 0
        self.keys: list[Tensor] = []
        self.named: dict[str, Any] = {"all": [torch.zeros(3)]}
        self.sizes: set[int] = set()
        self.last: Tensor | None = None
        self.table = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(self.conv(x)).mean((2, 3)))
        if len(x) > 2:
            raise ValueError("too many")
        with torch.no_grad():
            self.count += 1
            self.replaced = self.replaced + 1
            self.seen += 1
            self.keys.append(y)
            self.named["all"][0][0] += 1
            self.named[f"call {self.seen}"] = y
            self.sizes.add(self.seen)
            self.last = self.table
            self.table[1] += 1
            self.late = y
        result: Tensor = y + self.count
        return result


def state(model: nn.Module) -> dict[str, Any]:
    """What a forward of :class:`Counting` changes."""
    names = ("count", "replaced", "seen", "keys", "named", "sizes", "last", "table", "late")
    return {name: copy.deepcopy(getattr(model, name, "none")) for name in names}


X = torch.randn(2, 3, 5, 5)
CALLS: dict[str, Callable[..., Any]] = {
    "optimize": lambda model, **given: transforms.optimize(model, sample_input=X, **given),
    "cast": lambda model, **given: transforms.optimize(
        model, sample_input=X, dtype=torch.bfloat16, **given
    ),
    "graph mode": lambda model, **given: transforms.optimize(
        model, sample_input=X, graph_mode=True, **given
    ),
    "quantize": lambda model, **given: transforms.quantize(
        model, [X, X], max_error=1.0, must_pay=True, **given
    ),
}


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in place"])
@pytest.mark.parametrize("name", CALLS)
def test_a_model_that_counts(name: str, inplace: bool) -> None:
    model = Counting().eval()
    with torch.no_grad():
        model(X)
    before, buffer, keys = state(model), model.count, model.keys
    ours = CALLS[name](model, inplace=inplace)
    assert_same(state(model), before)
    assert_same(state(ours), before)
    assert model.count is buffer
    assert model.keys is keys
    if name == "optimize":
        assert "sample_input" not in transforms.report(ours).passes  # its outputs come again


def test_a_refused_sample() -> None:
    class Late(Counting):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("refused")

    model = Late().eval()
    before = state(model)
    for _ in range(2):
        with pytest.raises(ValueError, match="fails with it"):
            transforms.optimize(model, sample_input=X, inplace=True)
        with pytest.raises(ValueError, match="fails with batch 0"):
            transforms.quantize(model, [X], inplace=True)
    assert_same(state(model), before)


def test_what_did_not_change_is_not_written() -> None:
    model = nn.BatchNorm2d(3).eval()
    model.running_mean[0] = torch.nan  # type: ignore[index]  # it has statistics
    versions = [buffer._version for buffer in model.buffers()]
    with put_back(model):
        model(torch.randn(2, 3, 4, 4))
    assert [buffer._version for buffer in model.buffers()] == versions


def test_hooks_that_a_call_registers() -> None:
    """transformers registers hooks in the first call that asks for hidden states."""
    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=32,
        output_hidden_states=True,
    )
    model = ViTModel(config).eval()
    x = torch.randn(2, 3, 32, 32)
    ours = transforms.optimize(model, sample_input=x)
    assert not any(module._forward_hooks for module in (*ours.modules(), *model.modules()))
    for each in (ours, model, ours):
        assert len(each(x).hidden_states) == 3


def test_hooks_that_a_call_removes() -> None:
    model, seen = nn.Linear(3, 4), []

    def once(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.append(True)
        handle.remove()

    handle = model.register_forward_hook(once, with_kwargs=True)
    with put_back(model):
        model(torch.randn(2, 3))
    model(torch.randn(2, 3))
    assert seen == [True, True]
    assert not model._forward_hooks


def test_lazy_modules_stay_initialized() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).eval()
    with put_back(model), torch.no_grad():
        model(torch.randn(2, 3))
    assert model[0].in_features == 3
    assert model[1].running_mean.shape == (4,)


def test_other_layouts_and_dtypes() -> None:
    model = nn.Module()
    for name, value in {
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "bool": torch.tensor(True),
        "complex": torch.zeros(2, dtype=torch.complex64),
        "float8": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "empty": torch.zeros(0),
        "transposed": torch.zeros(2, 3).t(),
        "expanded": torch.zeros(1, 3).expand(2, 3),
    }.items():
        model.register_buffer(name, value)
    with put_back(model):
        model.bool.fill_(False)  # type: ignore[operator, union-attr]  # a buffer
        model.complex[0] = 1j  # type: ignore[operator, index]
        model.transposed.resize_(4)  # type: ignore[operator, union-attr]
    assert bool(model.bool)
    assert not model.complex.any()  # type: ignore[operator, union-attr]
    assert model.transposed.shape == (3, 2)
