"""Attention with dropout, whose gradients are computed from what the forward pass keeps.

The formulas are those of torch's math path. Matrices of weights are kept in the dtype of the
values, and the scores are float32 at least, as in torch's flash kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedoptim._torch_private import has_bfloat16_products, softmax_backward
from fusedoptim.ops._dropout import dropout

__all__ = ["attention"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    seed: Tensor,
    p: float,
    scale: float,
) -> Tensor:
    """``dropout(softmax(scale * query @ key.mT + mask)) @ value``, of one dtype and batch.

    ``mask`` is a float tensor that broadcasts to the scores. A row that it masks entirely gets
    zeros.
    """
    batch, scores = query.shape[:-2], (query.shape[-2], key.shape[-2])
    is_empty = None
    if is_causal:  # leaves each row its first element
        mask = query.new_full(scores, -torch.inf).triu_(1)
    elif mask is not None:
        is_empty = (mask == -torch.inf).all(-1, keepdim=True)
        mask = mask.masked_fill(is_empty, 0.0)
    if mask is not None:
        mask = mask.expand(*batch, *scores)
    tensors = [tensor.flatten(0, -3) for tensor in (query, key, value)]
    if query.dtype == torch.float16 or not has_bfloat16_products:
        wide = torch.promote_types(query.dtype, torch.float32)
        tensors = [tensor.to(wide) for tensor in tensors]
    with _without_autocast(query):
        output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            *tensors, mask, is_empty, seed, p, scale
        )
    return output.view(*batch, *output.shape[-2:]).to(value.dtype)


def _without_autocast(factor: Tensor) -> torch.autocast:
    """A context in which matrix products have the dtype of their factors."""
    return torch.autocast(factor.device.type, enabled=False)


class _Attention(torch.autograd.Function):
    """Attention of matrices (N, L, E), (N, S, E) and (N, S, V), with a mask of (..., L, S)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_empty: Tensor | None,
        seed: Tensor,
        p: float,
        scale: float,
    ) -> Tensor:
        weights = _weights(query, key, mask, is_empty, scale)
        dropped = dropout(weights, seed, p)
        ctx.save_for_backward(query, key, value, mask, is_empty, seed, weights, dropped)
        ctx.p, ctx.scale = p, scale
        return torch.bmm(dropped, value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, is_empty, seed, weights, dropped = ctx.saved_tensors
        needs_query, needs_key, needs_value, needs_mask = ctx.needs_input_grad[:4]
        of_query = of_key = of_value = of_mask = None
        with _without_autocast(grad):
            if torch.is_grad_enabled():  # of backward(create_graph=True)
                weights = _weights(query, key, mask, is_empty, ctx.scale)
                dropped = dropout(weights, seed, ctx.p)
            if needs_value:
                of_value = torch.bmm(dropped.mT, grad)
            if needs_query or needs_key or needs_mask:
                of_weights = dropout(torch.bmm(grad, value.mT), seed, ctx.p)
                of_scores = softmax_backward(of_weights, weights, -1, weights.dtype)
                if needs_query:
                    of_query = _scaled_product(of_scores, key, ctx.scale)
                if needs_key:
                    of_key = _scaled_product(of_scores.mT, query, ctx.scale)
                if needs_mask:
                    of_mask = of_scores.view(mask.shape).to(mask.dtype)
        return of_query, of_key, of_value, of_mask, None, None, None, None


def _weights(
    query: Tensor, key: Tensor, mask: Tensor | None, is_empty: Tensor | None, scale: float
) -> Tensor:
    """The weights before dropout, in the query's dtype."""
    real = torch.promote_types(query.dtype, torch.float32)
    scores = _scaled_product(query.to(real), key.to(real).mT, scale)
    if mask is None:
        return torch.softmax(scores, -1).to(query.dtype)
    scores.view(mask.shape).add_(mask)
    weights = torch.softmax(scores, -1).to(query.dtype)
    if is_empty is not None:
        weights = weights.view(mask.shape).masked_fill(is_empty, 0.0).view(scores.shape)
    return weights


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    unused = left.new_empty(1, 1, 1)
    return torch.baddbmm(unused, left, right, beta=0, alpha=scale)
