"""Gradients of embedding bags by torch's operations: sparse ones, and those of sample weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tensors = Sequence[Tensor]


def by_table(
    indices: Tensors, offsets: Tensors, tables: int, last: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The indices of each table, and where its bags begin in them and where the last one ends."""
    if len(indices) == tables:
        ends = [starts.new_tensor([len(values)]) for values, starts in zip(indices, offsets)]
        whole = [x if last else torch.cat([x, end]) for x, end in zip(offsets, ends)]
        return list(indices), whole
    (values,), (starts,) = indices, offsets
    if not last:
        starts = torch.cat([starts, starts.new_tensor([len(values)])])
    bags = (len(starts) - 1) // tables
    of_tables = [starts[t * bags : (t + 1) * bags + 1] for t in range(tables)]
    if not bags:
        return [values[:0]] * tables, of_tables
    cuts = [(int(part[0]), int(part[-1])) for part in of_tables]
    own = [values[begin:end] for begin, end in cuts]
    return own, [part - begin for part, (begin, _) in zip(of_tables, cuts)]


def _bags_of(starts: Tensor) -> Tensor:
    """The bag of each index."""
    return torch.repeat_interleave(starts.diff())


def _by_bag(grads: Sequence[Tensor | None], weights: Tensors) -> Sequence[Tensor | None]:
    """The gradient of each table's bags."""
    if len(grads) == len(weights):
        return grads
    (joined,) = grads
    assert joined is not None
    return torch.split(joined, [weight.shape[1] for weight in weights], dim=1)


def sparse_gradient(weight: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """A table's gradient as torch has it: not coalesced, a row for each index."""
    return torch.sparse_coo_tensor(rows[None].long(), values, weight.shape, check_invariants=False)


def dense_gradient(weight: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """A table's gradient, also for many gradients of the bags at once."""
    return torch.zeros_like(weight).index_add(0, rows, values)


def table_gradients(
    make: Callable[[Tensor, Tensor, Tensor], Tensor],
    grads: Tensors,
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
) -> list[Tensor]:
    """The tables' gradients; ``make`` takes a table, the rows that were read and their values."""
    own, starts = by_table(indices, offsets, len(weights), last)
    factors: Sequence[Tensor | None] = [None] * len(weights)
    if samples:
        factors, _ = by_table(samples, offsets, len(weights), last)
    results = []
    for t, grad in enumerate(_by_bag(grads, weights)):
        assert grad is not None
        bags, rows, factor = _bags_of(starts[t]), own[t][: int(starts[t][-1])], factors[t]
        if factor is not None:
            factor = factor[: len(rows)]
        if paddings[t] >= 0:
            counts = rows != paddings[t]
            bags, rows = bags[counts], rows[counts]
            factor = None if factor is None else factor[counts]
        values = grad.index_select(0, bags)
        if means[t]:
            factor = torch.bincount(bags, minlength=len(grad)).to(grad.dtype).reciprocal()[bags]
        if factor is not None:
            values = values * factor[:, None]
        results.append(make(weights[t], rows, values))
    return results


def sample_gradients(
    grads: Sequence[Tensor | None],
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    paddings: Sequence[int],
    last: bool,
) -> list[Tensor]:
    """The gradients of the sample weights, laid out as they are."""
    own, starts = by_table(indices, offsets, len(weights), last)
    results = []
    for t, grad in enumerate(_by_bag(grads, weights)):
        result = weights[t].new_zeros(len(own[t]))
        if grad is not None:
            bags = _bags_of(starts[t])
            rows = own[t][: len(bags)]
            products = (grad.index_select(0, bags) * weights[t].index_select(0, rows)).sum(1)
            known = torch.where(rows == paddings[t], 0.0, products)
            result = torch.cat([known, result[len(bags) :]])
        results.append(result)
    if len(indices) == len(weights):
        return results
    result = torch.cat(results)
    rest = weights[0].new_zeros(len(indices[0]) - len(result))
    return [torch.cat([result, rest])]
