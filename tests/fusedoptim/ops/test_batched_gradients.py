"""Gradients for many vectors at once, by torch's vectorized autograd, equal those for one each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from fusedoptim import nn, ops
from fusedoptim.nn.functional import scaled_dot_product_attention
from fusedoptim.ops._linear import linear

SEED = torch.tensor(7)
BOXES = torch.tensor([[0.0, 1, 1, 6, 5], [1, 0, 0, 4, 7]])
CLASSES = torch.arange(5)
INDICES, OFFSETS = torch.tensor([3, 0, 3, 5, 1]), torch.tensor([0, 2, 2])
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "dropout": (lambda x: ops.dropout(x, SEED, 0.5), [(4, 3)]),
    "dropout, transposed": (lambda x: ops.dropout(x.t(), SEED, 0.5), [(4, 3)]),
    "alpha_dropout": (lambda x: ops.alpha_dropout(x, SEED, 0.5), [(4, 3)]),
    "attention": (
        lambda *x: scaled_dot_product_attention(*x, dropout_p=0.3),
        [(2, 4, 8), (2, 5, 8), (2, 5, 6)],
    ),
    "interaction": (lambda *x: ops.interaction(*x), [(5, 4), (5, 3, 4)]),
    "embedding_bags": (
        lambda *x: torch.cat(
            ops.embedding_bags(
                x, [INDICES] * 2, [OFFSETS] * 2, mean=[False, True], padding_idx=[None, 1]
            ),
            1,
        ),
        [(7, 4), (6, 3)],
    ),
    "embedding_bags, weighted": (
        lambda x, samples: ops.embedding_bags([x], [INDICES], [OFFSETS], [samples])[0],
        [(7, 4), (5,)],
    ),
    "linear": (lambda *x: linear(*x, None), [(5, 4), (6, 4)]),
    "roi_align": (lambda x: ops.roi_align(x, BOXES, 2), [(2, 3, 8, 9)]),
    "gelu_tanh": (ops.gelu_tanh, [(4, 3)]),
    "cross_entropy": (lambda x: ops.cross_entropy(x, CLASSES)[0], [(5, 6)]),
}


@pytest.mark.parametrize("is_differentiable", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_for_one_vector_each(name: str, is_differentiable: bool) -> None:
    function, shapes = FUNCTIONS[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    output = function(*inputs)
    vectors = torch.randn(3, *output.shape)
    batched = torch.autograd.grad(
        output,
        inputs,
        vectors,
        is_grads_batched=True,
        retain_graph=True,
        create_graph=is_differentiable,
    )
    each = [torch.autograd.grad(output, inputs, v, retain_graph=True) for v in vectors]
    for found, expected in zip(batched, map(torch.stack, zip(*each))):
        torch.testing.assert_close(found, expected)


def test_multihead_attention() -> None:
    module, x = nn.MultiheadAttention(8, 2, dropout=0.3), torch.randn(5, 2, 8, requires_grad=True)
    output, _ = module(x, x, x)
    vectors = torch.randn(3, *output.shape)
    (batched,) = torch.autograd.grad(output, x, vectors, is_grads_batched=True, retain_graph=True)
    for found, vector in zip(batched, vectors):
        torch.testing.assert_close(
            found, torch.autograd.grad(output, x, vector, retain_graph=True)[0]
        )


@pytest.mark.parametrize("derivative", [jacobian, hessian])
def test_vectorized_derivatives(derivative: Callable[..., Tensor]) -> None:
    """Every call of the function draws the same mask."""

    def function(x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        dropped = nn.Dropout(0.5)(x) ** 3
        return dropped if derivative is jacobian else dropped.sum()

    seed, x = int(torch.randint(1 << 30, ())), torch.randn(4, 3, dtype=torch.float64)
    found, expected = (derivative(function, x, vectorize=v) for v in (True, False))
    torch.testing.assert_close(found, expected)
