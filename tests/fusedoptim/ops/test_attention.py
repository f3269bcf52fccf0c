"""Gradients of attention with dropout where some of its inputs are frozen."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fusedoptim.nn.functional import scaled_dot_product_attention as attention
from tests.compiling import needs_compiler, quiet_compiler
from tests.fusedoptim.helpers import assert_within
from tests.tolerances import attention_errors

NAMES = ("query", "key", "value", "mask")
TINY = 1e-300
"""A probability so small that nothing is dropped, and that the others are divided by one."""
each_choice = pytest.mark.parametrize(
    "trained",
    [chosen for count in (1, 2, 3, 4) for chosen in itertools.combinations(NAMES, count)],
    ids=", ".join,
)
"""Which inputs require a gradient."""


def inputs(
    trained: Collection[str], dtype: torch.dtype = torch.float64, rows: int = 9, columns: int = 11
) -> list[Tensor]:
    shapes = ((rows, 8), (columns, 8), (columns, 5), (rows, columns))
    return [
        torch.randn(2, 3, *shape, dtype=dtype, requires_grad=name in trained)
        for name, shape in zip(NAMES, shapes)
    ]


def with_gradients(tensors: list[Tensor], trained: Collection[str]) -> list[Tensor]:
    return [x.detach().requires_grad_(name in trained) for name, x in zip(NAMES, tensors)]


class _Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@each_choice
def test_gradients_are_torchs(trained: Collection[str]) -> None:
    tensors = inputs(trained)
    copies = with_gradients(tensors, NAMES)
    y = attention(*tensors, dropout_p=TINY)
    expected = torch.nn.functional.scaled_dot_product_attention(*copies)
    grad = torch.randn_like(y)
    expected.backward(grad)
    assert y.grad_fn is not None
    node = y.grad_fn.next_functions[0][0]  # y is a view
    assert node is not None
    computed: list[Any] = []
    node.register_hook(lambda found, _: computed.extend(found))
    y.backward(grad)

    query, key, value, mask = with_gradients(tensors, ())
    kept = torch.ones(mask.shape, dtype=torch.float64)
    allowed = attention_errors(query, key, value, mask, kept, 1 / math.sqrt(8), grad, torch.float64)
    for name, x, copy, own, error in zip(NAMES, tensors, copies, computed, allowed[1:]):
        if name in trained:
            assert x.grad is not None
            assert copy.grad is not None
            assert_within(x.grad, copy.grad, 2 * error, f"gradient of {name}")
        else:
            assert own is None
            assert x.grad is None


@each_choice
@pytest.mark.parametrize("is_differentiable", [False, True])
def test_as_where_nothing_is_frozen(trained: Collection[str], is_differentiable: bool) -> None:
    """The same weights are dropped, so gradients have the same bits."""
    tensors = inputs(trained, torch.float32)
    grad, found = torch.randn(2, 3, 9, 5), []
    for chosen in (trained, NAMES):
        given = with_gradients(tensors, chosen)
        torch.manual_seed(3)
        y = attention(*given, dropout_p=0.5)
        wanted = [x for name, x in zip(NAMES, given) if name in trained]
        found.append(torch.autograd.grad(y, wanted, grad, create_graph=is_differentiable))
    assert all(map(torch.equal, *found))


@each_choice
def test_only_needed_products_are_computed(trained: Collection[str]) -> None:
    y = attention(*inputs(trained), dropout_p=0.5)
    with _Calls() as calls:
        y.sum().backward()
    of_scores = int(any(name != "value" for name in trained))
    assert calls.counts["bmm"] == of_scores + ("value" in trained)
    assert calls.counts["_softmax_backward_data"] == of_scores
    assert calls.counts["baddbmm"] == ("query" in trained) + ("key" in trained)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_gradients(name: str) -> None:
    tensors = inputs([name], rows=2, columns=3)
    place = NAMES.index(name)

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return attention(*tensors[:place], x, *tensors[place + 1 :], dropout_p=0.4)

    assert torch.autograd.gradgradcheck(function, tensors[place])


@needs_compiler
@quiet_compiler
@pytest.mark.parametrize("trained", [("query",), ("value",), ("key", "mask")], ids=", ".join)
def test_compiled(trained: Collection[str]) -> None:
    torch._dynamo.reset()
    tensors = inputs(trained)
    query, key, value, mask = with_gradients(tensors, ())
    grad, found = torch.randn(2, 3, 9, 5, dtype=torch.float64), []
    for call in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        given = with_gradients(tensors, trained)
        call(*given, dropout_p=TINY).backward(grad)
        found.append([x.grad for x in given])
    kept = torch.ones(mask.shape, dtype=torch.float64)
    allowed = attention_errors(query, key, value, mask, kept, 1 / math.sqrt(8), grad, torch.float64)
    for name, eager, compiled, error in zip(NAMES, *found, allowed[1:]):
        assert (compiled is not None) == (name in trained)
        if compiled is not None:
            assert eager is not None
            assert_within(compiled, eager, 2 * error, f"gradient of {name}")
