"""torch.fx records our modules as single calls, and our functions as torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusedoptim.nn as ours
from fusedoptim import transforms
from fusedoptim.nn import functional


class Model(nn.Module):
    """One of our modules after a Linear."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.ours = module

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        if isinstance(self.ours, nn.MultiheadAttention):
            return self.ours(y, y, value=y, need_weights=False)[0]
        if isinstance(self.ours, nn.CrossEntropyLoss):
            return self.ours(y[0], target=torch.tensor([0, 1, 2]))
        return self.ours(y)


MODULES: list[Callable[[], nn.Module]] = [
    lambda: ours.AlphaDropout(0.5),
    lambda: ours.CrossEntropyLoss(),
    lambda: ours.Dropout(0.5),
    lambda: ours.GELU("tanh"),
    lambda: ours.MultiheadAttention(8, 2, dropout=0.5),
]


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_module_is_one_call(make: Callable[[], nn.Module], is_training: bool) -> None:
    """So the traced model follows train() and eval(), whichever was the model's in the trace."""
    model, x = Model(make()).train(is_training), torch.randn(2, 3, 8)
    traced = torch.fx.symbolic_trace(model)
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["linear", "ours"]
    for training in (False, True, False):
        outputs = []
        for each in (model, traced):
            torch.manual_seed(0)
            outputs.append(each.train(training)(x))
        assert torch.equal(*outputs)
    assert torch.equal(traced(x), traced(x))
    if model.ours._get_name() in ("Dropout", "AlphaDropout", "MultiheadAttention"):
        assert not torch.equal(traced.train()(x), traced(x))


class BagModel(nn.Module):
    """Merged bags before a Linear, given tensors or lists of them."""

    def __init__(self, are_lists: bool) -> None:
        super().__init__()
        self.ours = ours.MergedEmbeddingBag([(5, 8), (7, 8)], optimizer="sgd", lr=0.1)
        self.linear = nn.Linear(16, 1)
        self.are_lists = are_lists

    def forward(self, indices: Tensor, offsets: Tensor) -> Any:
        if self.are_lists:
            bags = self.ours([indices[:4], torch.tensor([6, 1])], [offsets[:2], offsets[2:] - 4])
            return self.linear(torch.cat([bags[0], bags[1]], 1))
        return self.linear(self.ours(indices, offsets))


@pytest.mark.parametrize("are_lists", [False, True])
def test_merged_bags_are_one_call(are_lists: bool) -> None:
    model = BagModel(are_lists)
    bags = torch.tensor([4, 0, 1, 1, 6, 1]), torch.tensor([0, 3, 4, 5])
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["ours", "linear"]
    for each in (model, traced):
        each(*bags).sum().backward()
    assert torch.equal(model(*bags), traced(*bags))


def test_a_model_that_optimize_prepared() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU("tanh"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = transforms.optimize(model, optimizer=optimizer, fuse_gelu=True)
    assert isinstance(prepared[1], ours.Dropout)
    traced = torch.fx.symbolic_trace(prepared).eval()
    x = torch.randn(2, 8)
    assert torch.equal(traced(x), prepared.eval()(x))


@pytest.mark.parametrize("module", [ours.Dropout(0.5), ours.GELU("tanh")])
def test_a_traced_module_alone_is_torchs_function(module: nn.Module) -> None:
    """As with torch's own: the flag is that of the trace."""
    traced = torch.fx.symbolic_trace(module.eval())
    x = torch.randn(2, 8)
    assert torch.equal(traced(x), module(x))


def test_hooks() -> None:
    """They would run in the trace and in every call."""
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        model = Model(ours.Dropout(0.5))
        handle = getattr(model.ours, register)(lambda module, *_: None)
        with pytest.raises(RuntimeError, match=r"fx traces fusedoptim\.nn\..*Dropout \('ours'\)"):
            torch.fx.symbolic_trace(model)
        handle.remove()
        torch.fx.symbolic_trace(model)


@pytest.mark.parametrize(
    ("call", "torchs"),
    [
        (lambda x: functional.dropout(x, 0.5), "dropout"),
        (lambda x: functional.alpha_dropout(x, 0.5, True), "alpha_dropout"),
        (lambda x: functional.gelu(x, "tanh"), "gelu"),
        (lambda x: functional.cross_entropy(x, x), "cross_entropy"),
        (lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), "scaled_dot"),
    ],
)
def test_a_function_is_torchs(call: Callable[[Any], Any], torchs: str) -> None:
    traced = torch.fx.symbolic_trace(call)
    assert [torchs in str(node.target) for node in traced.graph.nodes] == [False, True, False]
    x = torch.rand(2, 3, 8)
    assert traced(x).shape == call(x).shape
    if torchs in ("gelu", "cross_entropy"):
        assert torch.equal(traced(x), call(x))
