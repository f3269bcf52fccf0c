"""Gradients of embedding bags by torch's operations: sparse ones, and those of sample weights.

They are operators, as tracing could not follow how many indices each table has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim._torch_private import is_batched
from fusedoptim.ops._launching import DEVICES

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


def tables_with_gradient(grads: Sequence[Tensor | None], tables: int) -> list[int]:
    """The tables whose bags have a gradient."""
    return [t for t in range(tables) if len(grads) < tables or grads[t] is not None]


def chosen_of(chosen: Sequence[int], tables: int, *lists: Sequence[Any]) -> list[list[Any]]:
    """The chosen entries of lists with one for each table; all entries of other lists."""
    if len(chosen) == tables:
        return list(map(list, lists))
    return [[x[t] for t in chosen] if len(x) == tables else list(x) for x in lists]


def _bags_of(starts: Tensor) -> Tensor:
    """The bag of each index."""
    return torch.repeat_interleave(starts.diff())


def _by_bag(grads: Tensors, weights: Tensors) -> Sequence[Tensor]:
    """The gradient of each table's bags."""
    if len(grads) == len(weights):
        return grads
    (joined,) = grads
    return torch.split(joined, [weight.shape[1] for weight in weights], dim=1)


def _row_gradients(
    grads: Tensors,
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
) -> list[Tensor]:
    """For each table, the rows that were read, followed by the gradient of each."""
    own, starts = by_table(indices, offsets, len(weights), last)
    factors: Sequence[Tensor | None] = [None] * len(weights)
    if samples:
        factors, _ = by_table(samples, offsets, len(weights), last)
    results: list[Tensor] = []
    for t, grad in enumerate(_by_bag(grads, weights)):
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
        results += rows.to(torch.int64, copy=True), values  # an operator returns no arguments
    return results


_row_gradients_of: Any = torch.library.custom_op(  # which raises where it is differentiated
    "fusedoptim::embedding_bags_row_gradients",
    _row_gradients,
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor[] grads, Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "Tensor[] per_sample_weights, bool[] means, int[] paddings, bool last) -> Tensor[]",
)


@_row_gradients_of.register_fake  # type: ignore[untyped-decorator]  # untyped in torch
def _(grads: Tensors, weights: Tensors, indices: Tensors, *_: Any) -> list[Tensor]:
    results: list[Tensor] = []
    for weight in weights:
        count = torch.library.get_ctx().new_dynamic_size()
        results.append(weight.new_empty(count, dtype=torch.int64))
        results.append(weight.new_empty(count, weight.shape[1]))
    return results


def sparse_gradients(grads: Tensors, weights: Tensors, *rest: Any) -> list[Tensor]:
    """The tables' gradients as torch has them: not coalesced, a row for each index."""
    found = _row_gradients_of(grads, weights, *rest)
    return [
        torch.sparse_coo_tensor(rows[None], values, weight.shape, check_invariants=False)
        for weight, rows, values in zip(weights, found[::2], found[1::2])
    ]


def batched_gradients(grads: Tensors, weights: Tensors, *rest: Any) -> list[Tensor]:
    """The tables' gradients for many gradients of the bags at once.

    torch calls no operator with a list of tensors for these.
    """
    found = _row_gradients(grads, weights, *rest)
    return [
        torch.zeros_like(weight).index_add(0, rows, values)
        for weight, rows, values in zip(weights, found[::2], found[1::2])
    ]


def _sample_gradients(
    grads: Tensors,
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    paddings: Sequence[int],
    last: bool,
) -> list[Tensor]:
    own, starts = by_table(indices, offsets, len(weights), last)
    results = []
    for t, grad in enumerate(_by_bag(grads, weights)):
        bags = _bags_of(starts[t])
        rows = own[t][: len(bags)]
        products = (grad.index_select(0, bags) * weights[t].index_select(0, rows)).sum(1)
        known = torch.where(rows == paddings[t], 0.0, products)
        results.append(torch.cat([known, weights[t].new_zeros(len(own[t]) - len(bags))]))
    if len(indices) == len(weights):
        return results
    result = torch.cat(results)
    rest = weights[0].new_zeros(len(indices[0]) - len(result))
    return [torch.cat([result, rest])]


_sample_gradients_of: Any = torch.library.custom_op(  # which raises where it is differentiated
    "fusedoptim::embedding_bags_sample_gradients",
    _sample_gradients,
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor[] grads, Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "int[] paddings, bool last) -> Tensor[]",
)
_sample_gradients_of.register_fake(
    lambda grads, weights, indices, *_: [weights[0].new_empty(own.shape) for own in indices]
)


def sample_gradients(
    grads: Sequence[Tensor | None],
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    paddings: Sequence[int],
    last: bool,
) -> list[Tensor]:
    """The gradients of the sample weights, laid out as they are.

    Args:
        grads: the gradients of the bags; None where there is none.
        weights: the tables.
        indices: their indices.
        offsets: their offsets.
        paddings: the index of each table that is ignored, or -1.
        last: whether offsets include where the last bag ends.
    """
    chosen = tables_with_gradient(grads, len(weights))
    arguments = chosen_of(chosen, len(weights), grads, weights, indices, offsets, paddings)
    # As for batched_gradients.
    of: Any = _sample_gradients if any(map(is_batched, arguments[0])) else _sample_gradients_of
    found: list[Tensor] = of(*arguments, last)
    if len(chosen) == len(weights):
        return found
    results = [weights[0].new_zeros(len(own)) for own in indices]
    for t, gradient in zip(chosen, found):
        results[t] = gradient
    return results
