"""The product of a Linear by oneDNN, whose gradients are products by the same operator.

torch computes products of float32 matrices with MKL. It ships oneDNN's product too, but without a
gradient. docs/design/float32-products.md says how long each takes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusedoptim._torch_private import transform_level
from fusedoptim.ops._registering import needed, register

LEAST_COLUMNS = 1024
"""Of the larger factor of a weight's gradient: from this many on, oneDNN gains more than copying
the smaller factor takes."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    r""":math:`y = x W^T + b` by oneDNN, on the CPU.

    Args:
        x: (..., K), float32; at least a matrix.
        weight: (N, K), contiguous or the transpose of a contiguous tensor, as its gradient will be.
        bias: (N,).

    Returns:
        a contiguous tensor (..., N).
    """
    result: Tensor = _linear(x, weight, bias)
    return result


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not (x.numel() and weight.numel()):  # oneDNN takes no empty matrices
        return torch.nn.functional.linear(x, weight, bias)
    if bias is not None:
        bias = bias.contiguous()  # oneDNN's operator ignores its strides
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result


def _like(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, _ = inputs
    needs_x, needs_weight, _ = needed(ctx)
    # As in torch, what a frozen weight's gradient would need is not kept.
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
    ctx.is_transposed = not weight.is_contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    rows = _matrix(grad).contiguous()
    of_x = of_weight = None
    if weight is not None:
        of_x = _product(rows, weight.t()).view(*grad.shape[:-1], weight.size(1))
    if x is not None:
        inputs = _matrix(x)
        if ctx.is_transposed:  # the gradient must be too, or torch would copy it
            of_weight = _transposed_product(inputs, rows).t()
        else:
            of_weight = _transposed_product(rows, inputs)
    return of_x, of_weight, rows.sum(0) if needed(ctx)[2] else None


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.size(-1))


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """:math:`A^T B`, contiguous."""
    # oneDNN's operator copies a transposed first factor, and torch's product does not. So the copy
    # must be small compared with the product.
    if a.size(1) < b.size(1) >= LEAST_COLUMNS:
        return _product(a.t(), b.t())
    return a.t().mm(b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    r""":math:`A B^T`; by torch where a gradient is computed for many vectors at once."""
    product = linear if transform_level() is None else torch.nn.functional.linear
    return product(a, b, None)


_linear = register(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    kernel=_compute,
    fake=_like,
    setup_context=_setup_context,
    backward=_backward,
)
