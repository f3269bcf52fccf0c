"""Merged embedding bags whose tables something else reads in the pass that updates them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fusedoptim.nn import MergedEmbeddingBag
from tests.fusedoptim.nn.merged_bags import OPTIMIZERS

FIRST, SECOND = [torch.tensor([0, 3, 3])], [torch.tensor([0, 3, 5])]
OFFSETS = [torch.tensor([0, 2])]


def new_module(optimizer: str | None) -> Any:
    torch.manual_seed(0)
    return MergedEmbeddingBag([(10, 4)], optimizer, **({"lr": 1.0} if optimizer else {}))


def weighted_twice(merged: Any, samples: Tensor) -> Tensor:
    """The gradient of the first call's sample weights needs the table as it was."""
    total: Tensor = merged(FIRST, OFFSETS, [samples])[0].sum()
    return total + merged(SECOND, OFFSETS, [samples])[0].sum()


def tied(merged: Any, samples: Tensor) -> Tensor:
    """So does the gradient of a product with the table."""
    total: Tensor = (samples @ merged[0].weight[:, :3].T).sum()
    return total + merged(FIRST, OFFSETS)[0].sum()


def called_twice(merged: Any, samples: Tensor) -> Tensor:
    """Sums need no table in the backward pass."""
    total: Tensor = merged(FIRST, OFFSETS)[0].sum()
    return total + merged(SECOND, OFFSETS)[0].sum() + samples.sum()


def gradients(function: Callable[[Any, Tensor], Tensor], optimizer: str | None) -> list[Tensor]:
    """Those of the sample weights and of the table, by autograd or from the update."""
    merged, samples = new_module(optimizer), torch.ones(3, requires_grad=True)
    before = merged[0].weight.detach().clone()
    function(merged, samples).backward()
    of_table = before - merged[0].weight if optimizer else merged[0].weight.grad
    assert samples.grad is not None
    return [samples.grad, of_table.detach()]


@pytest.mark.parametrize("weighted", [False, True])
def test_frozen_tables_give_outputs_without_gradient(weighted: bool) -> None:
    merged = MergedEmbeddingBag([(10, 4)] * 3)
    merged[1].weight.requires_grad_(False)
    merged[2].weight.requires_grad_(False)
    samples = [torch.ones(3, requires_grad=t == 1) for t in range(3)] if weighted else None
    found = merged(FIRST * 3, OFFSETS * 3, samples)
    assert [bag.requires_grad for bag in found] == [True, weighted, False]
    sum(bag.sum() for bag in found).backward()
    assert [bag.weight.grad is not None for bag in merged] == [True, False, False]
    if samples is not None:
        assert samples[1].grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # inductor uses it
@pytest.mark.filterwarnings("ignore:Error detected")  # where tracers find the error
class TestCompiled:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        """Trace in each test, also what inductor's cache has."""
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        torch.compiler.reset()

    @pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("function", [weighted_twice, tied])
    def test_what_reads_updated_tables_raises(
        self, function: Any, optimizer: str, backend: str | None
    ) -> None:
        called = function if backend is None else torch.compile(function, backend=backend)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(called, optimizer)

    def test_two_graphs(self) -> None:
        merged = new_module("sgd")
        called = torch.compile(merged, backend="aot_eager")
        outputs = called(FIRST, OFFSETS)[0], called(SECOND, OFFSETS)[0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.stack(outputs).sum().backward()

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_two_calls(self, backend: str) -> None:
        called = torch.compile(called_twice, backend=backend, fullgraph=True)
        found, wanted = gradients(called, "sgd"), gradients(called_twice, None)
        torch.testing.assert_close(found, wanted)


def test_gradients_of_other_layers_alone() -> None:
    """As the class says, autograd then does not get to the tables."""
    merged, top = new_module("sgd"), torch.nn.Linear(4, 1)
    before = merged[0].weight.detach().clone()
    torch.autograd.grad(top(merged(FIRST, OFFSETS)[0]).sum(), [*top.parameters()])
    top(merged(FIRST, OFFSETS)[0]).sum().backward(inputs=[*top.parameters()])
    assert torch.equal(merged[0].weight, before)


def towers(merged: Any, top: torch.nn.Linear, is_reentrant: bool, calls: list[Any]) -> Tensor:
    """The sum of what checkpointed calls of a module and a layer return."""

    def tower(indices: Tensor, start: Tensor) -> Tensor:
        result: Tensor = top(torch.tanh(merged([indices], OFFSETS)[0] + start)).square().sum()
        return result

    start = torch.zeros((), requires_grad=True)  # without an argument with gradient there is none
    total: Any = sum(
        checkpoint(tower, *indices, start, use_reentrant=is_reentrant) for indices in calls
    )
    return total


class TestCheckpointed:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("is_reentrant", [False, True])
    @pytest.mark.parametrize("is_compiled", [False, True])
    def test_two_calls(self, optimizer: str, is_reentrant: bool, is_compiled: bool) -> None:
        """The first is computed again after the update of the second."""
        torch.compiler.reset()
        merged, top = new_module(optimizer), torch.nn.Linear(4, 1)
        called = torch.compile(merged, backend="aot_eager") if is_compiled else merged
        y = towers(called, top, is_reentrant, [FIRST, SECOND])
        with pytest.raises(
            RuntimeError, match=r"computes their bags again, as torch\.utils\.check"
        ):
            y.backward()

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("is_reentrant", [False, True])
    def test_one_call_in_each_pass(self, optimizer: str, is_reentrant: bool) -> None:
        merged, top = new_module(optimizer), torch.nn.Linear(4, 1)
        other, other_top = copy.deepcopy((merged, top))
        for indices in (FIRST, SECOND):
            towers(merged, top, is_reentrant, [indices]).backward()
            other_top(torch.tanh(other(indices, OFFSETS)[0])).square().sum().backward()
        assert torch.equal(merged[0].weight, other[0].weight)
        assert torch.equal(top.weight.grad, other_top.weight.grad)
