"""Merged embedding bags whose tables something else reads in the pass that updates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor uses it
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

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_two_calls(self, backend: str) -> None:
        called = torch.compile(called_twice, backend=backend, fullgraph=True)
        found, wanted = gradients(called, "sgd"), gradients(called_twice, None)
        torch.testing.assert_close(found, wanted)
