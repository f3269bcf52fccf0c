"""Bags of several embedding tables, which the backward pass updates."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fusedoptim._torch_private import BelowAutograd, increment_version
from fusedoptim.ops._bag_batch import Batch
from fusedoptim.ops._bag_gradients import sample_gradients
from fusedoptim.ops._embedding_bags import (
    Gradient,
    bags_and_batch,
    batch_of,
    chosen_of,
    compute_bags,
    new_bags,
    saved_lists,
    tables_with_gradient,
)
from fusedoptim.ops._launching import VARIANT_OF
from fusedoptim.ops._registering import is_plain, needed, register, register_without_gradient

Tensors = Sequence[Tensor]


class Rule(Protocol):
    """How the tables are updated."""

    @property
    def kernel(self) -> str:
        """The name of the kernel."""

    def numbers(self) -> Mapping[str, float]:
        """The current hyper-parameters that the kernel gets."""


_rules: weakref.WeakValueDictionary[int, Rule] = weakref.WeakValueDictionary()
_next_number = itertools.count()


def numbered(rule: Rule) -> int:
    """A number by which the operator finds a rule for as long as it exists.

    A compiled graph holds this number; it would otherwise hold the hyper-parameters of its first
    call.
    """
    number = next(_next_number)
    _rules[number] = rule
    return number


def _forward(anchor: Tensor, weights: Tensors, sums: Tensors, trails: Tensors, *rest: Any) -> Any:
    return compute_bags(weights, *rest[:-1])


def _direct(ctx: Any, _: Tensor, weights: Tensors, __: Tensors, ___: Tensors, *rest: Any) -> Any:
    with BelowAutograd():
        bags, batch = bags_and_batch(weights, *rest[:-1])
    if ctx is not None:
        ctx.batch = batch
    return bags


def _fake(anchor: Tensor, weights: Tensors, sums: Tensors, trails: Tensors, *rest: Any) -> Any:
    return new_bags(weights, *rest[:-1])


def _update(
    weights: Tensors,
    sums: Tensors,
    trails: Tensors,
    grads: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
    rule: int,
) -> None:
    batch = batch_of(weights, indices, offsets, samples, last)
    _update_rows(weights, sums, trails, grads, batch, means, paddings, rule)


def _update_rows(
    weights: Tensors,
    sums: Tensors,
    trails: Tensors,
    grads: Tensors,
    batch: Batch,
    means: Sequence[bool],
    paddings: Sequence[int],
    rule: int,
) -> None:
    found = _rules[rule]
    gradient = Gradient(grads, weights, batch, means, paddings)
    columns = {"param": weights}
    if sums:
        columns["sum"] = sums
    if trails:
        columns["trail"] = trails
    variant = "split" if trails else VARIANT_OF[weights[0].dtype]
    gradient.walk(found.kernel, variant, columns, found.numbers())
    increment_version(weights)


_update_tables = register_without_gradient(
    "update_embedding_bags(Tensor(a!)[] weights, Tensor(b!)[] sums, Tensor(c!)[] trails, "
    "Tensor[] grads, Tensor[] indices, Tensor[] offsets, Tensor[] samples, bool[] means, "
    "int[] paddings, bool last, int rule) -> ()",
    kernel=_update,
    fake=lambda *_: None,
)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Tensors) -> None:
    _, ctx.weights, ctx.sums, ctx.trails, indices, offsets, samples, *ctx.options = inputs
    ctx.counts = [len(indices), len(offsets), len(samples)]
    ctx.save_for_backward(*indices, *offsets, *samples)


def _backward(ctx: Any, *grads: Tensor | None) -> list[Any]:
    weights, sums, trails = ctx.weights, ctx.sums, ctx.trails
    indices, offsets, samples = saved_lists(ctx)
    means, paddings, last, rule = ctx.options
    of_samples = None
    if needed(ctx)[6]:
        of_samples = sample_gradients(grads, weights, indices, offsets, paddings, last)
    chosen = tables_with_gradient(grads, len(weights))
    batch, ctx.batch = getattr(ctx, "batch", None), None  # it holds memory
    if batch is not None and len(chosen) == len(weights) and is_plain(grads):
        of_all: Any = grads
        _update_rows(weights, sums, trails, of_all, batch, means, paddings, rule)
    else:
        lists = weights, sums, trails, grads, indices, offsets, samples, means, paddings
        _update_tables(*chosen_of(chosen, len(weights), *lists), last, rule)
    return [None, None, None, None, None, None, of_samples, None, None, None, None]


_updated_bags = register(
    "updated_embedding_bags(Tensor anchor, Tensor[] weights, Tensor[] sums, Tensor[] trails, "
    "Tensor[] indices, Tensor[] offsets, Tensor[] samples, bool[] means, int[] paddings, "
    "bool last, int rule) -> Tensor[]",
    kernel=_forward,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    direct=_direct,
)


def updated_embedding_bags(
    anchor: Tensor,
    weights: Tensors,
    sums: Tensors,
    trails: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
    rule: int,
) -> list[Tensor]:
    """The bags of :func:`embedding_bags`, whose backward pass updates the tables.

    Args:
        anchor: any tensor that requires grad, so that there is a backward pass; it gets none.
        weights: the tables, which do not require grad.
        sums: Adagrad's state, or none.
        trails: the lower halves of split tables, or none.
        indices: the indices, as :func:`embedding_bags` takes them.
        offsets: the offsets, as :func:`embedding_bags` takes them.
        samples: the sample weights, as :func:`embedding_bags` takes them.
        means: whether each table's bags are means.
        paddings: the index of each table that is ignored, or -1.
        last: whether offsets include where the last bag ends.
        rule: the number of the rule that updates the tables (:func:`numbered`).
    """
    result: list[Tensor] = _updated_bags(
        anchor, weights, sums, trails, indices, offsets, samples, means, paddings, last, rule
    )
    return result
