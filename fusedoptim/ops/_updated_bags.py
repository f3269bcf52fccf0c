"""Bags of several embedding tables, which the backward pass updates."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from fusedoptim._torch_private import BelowAutograd, backward_pass, increment_version
from fusedoptim.ops._bag_batch import Batch
from fusedoptim.ops._bag_checks import as_lists
from fusedoptim.ops._bag_gradients import chosen_of, sample_gradients, tables_with_gradient
from fusedoptim.ops._bag_rows import ROWWISE, Gradient
from fusedoptim.ops._bag_tables import Tables, tables_of
from fusedoptim.ops._embedding_bags import (
    bags_and_batch,
    batch_of,
    check_again,
    check_like,
    compute_bags,
    new_bags,
    save_lists,
    saved_lists,
)
from fusedoptim.ops._registering import is_plain, needed, register, register_without_gradient

Tensors = Sequence[Tensor]
_SAMPLES = 4
"""The place of the sample weights among the operator's arguments."""


class Rule(Protocol):
    """How the tables are updated."""

    updated_in: int
    """The number of the last backward pass that has updated them, or -1."""

    @property
    def kernel(self) -> str:
        """The name of the kernel."""

    def numbers(self) -> Mapping[str, float]:
        """The current hyper-parameters that the kernel gets in the update that begins."""

    def begin_pass(self) -> None:
        """Prepare a forward pass; raise if it is of replicas whose tables must stay equal."""

    def state_lists(self, chosen: Sequence[int]) -> tuple[Tensors, Tensors]:
        """The current state of chosen tables: sums and lower halves, each for all or none."""


_rules: weakref.WeakValueDictionary[int, Rule] = weakref.WeakValueDictionary()
_next_number = itertools.count()


def numbered(rule: Rule) -> int:
    """A number by which the operator finds a rule for as long as it exists.

    A compiled graph holds this number; it would otherwise hold the hyper-parameters of its first
    call, and state that a checkpoint may replace.
    """
    number = next(_next_number)
    _rules[number] = rule
    return number


def _rule_of(number: int) -> Rule:
    rule = _rules.get(number)
    if rule is None:
        raise RuntimeError(
            "MergedEmbeddingBag: the module was deleted before the backward pass of its bags, "
            "which updates its tables; keep the module until then"
        )
    return rule


def _forward(anchor: Tensor, weights: Tensors, *rest: Any) -> Any:
    *arguments, rule = rest
    _check_pass(tables_of(weights), weights, rule)
    return compute_bags(weights, *arguments)


def _direct(ctx: Any, _: Tensor, weights: Tensors, *rest: Any) -> Any:
    *arguments, rule = rest
    with BelowAutograd():
        bags, batch = bags_and_batch(weights, *arguments)
    if ctx is not None:
        _check_pass(batch.tables, weights, rule)
        ctx.batch = batch
    return bags


def _check_pass(tables: Tables, weights: Tensors, rule: int) -> None:
    """Raise unless the backward pass of this forward pass can update the tables."""
    found, backward = _rule_of(rule), backward_pass()
    if -1 != backward <= found.updated_in:
        raise RuntimeError(
            "MergedEmbeddingBag: a backward pass that has updated the tables computes their bags "
            "again, as torch.utils.checkpoint does, and would get others than before; in each "
            "pass, call the module in one checkpoint, outside of checkpoints, or without an "
            "optimizer"
        )
    found.begin_pass()
    _state_of(tables, weights, range(len(weights)), found)


def _state_of(
    tables: Tables, weights: Tensors, chosen: Sequence[int], rule: Rule
) -> tuple[Tensors, Tensors]:
    """The state of chosen tables; raise unless the kernel can update it and them in place."""
    sums, trails = rule.state_lists(chosen)
    tables.check_updated(weights, sums, trails, is_rowwise=rule.kernel == ROWWISE)
    return sums, trails


def _fake(anchor: Tensor, weights: Tensors, *rest: Any) -> Any:
    return new_bags(weights, *rest[:-1])


def _update(
    weights: Tensors,
    grads: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    chosen: Sequence[int],
    last: bool,
    rule: int,
) -> None:
    batch = batch_of(tables_of(weights), indices, offsets, samples, last)
    _check_grads(grads, batch)
    _update_rows(weights, grads, batch, means, paddings, chosen, rule)


def _check_grads(grads: Tensors, batch: Batch) -> None:
    """Raise unless these gradients are those of the bags of the batch's tables."""
    tables, shape = batch.tables, batch.shape
    widths = [int(tables.widths.sum())] if shape.is_joined else tables.widths.tolist()
    wanted = [(tables.dtype, size) for size in zip(shape.bags_of_tensor, widths)]
    if [(grad.dtype, tuple(grad.shape)) for grad in grads] != wanted:
        raise RuntimeError(
            "MergedEmbeddingBag: gradients do not fit the tables, whose shapes or dtype changed "
            "between the forward and the backward pass; change tables before the forward pass"
        )


def _update_rows(
    weights: Tensors,
    grads: Tensors,
    batch: Batch,
    means: Sequence[bool],
    paddings: Sequence[int],
    chosen: Sequence[int],
    rule: int,
) -> None:
    found, tables = _rule_of(rule), tables_of(weights)
    check_like(tables, batch.tables)
    sums, trails = _state_of(tables, weights, chosen, found)
    gradient = Gradient(grads, batch, means, paddings)
    columns = {"param": weights}
    if sums:
        columns["sum"] = sums
    if trails:
        columns["trail"] = trails
    variant = "split" if trails else batch.tables.variant
    numbers = found.numbers()
    found.updated_in = backward_pass()
    gradient.walk(found.kernel, variant, columns, numbers)
    increment_version(weights)


_update_tables = register_without_gradient(
    "update_embedding_bags(Tensor(a!)[] weights, Tensor[] grads, Tensor[] indices, "
    "Tensor[] offsets, Tensor[] per_sample_weights, bool[] means, int[] paddings, int[] chosen, "
    "bool last, int rule) -> ()",
    kernel=_update,
    fake=lambda *_: None,
)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Tensors) -> None:
    _, ctx.weights, indices, offsets, samples, *ctx.options = inputs
    ctx.rule = _rules.get(ctx.options[-1])  # for as long as there may be a backward pass
    # Updates change the tables, and gradients of sample weights need them as they were.
    read = ctx.weights if samples and needed(ctx)[_SAMPLES] else []
    save_lists(ctx, read, indices, offsets, samples)


def _backward(ctx: Any, *grads: Tensor | None) -> list[Any]:
    weights, (read, indices, offsets, samples) = ctx.weights, saved_lists(ctx)
    means, paddings, last, rule = ctx.options
    of_samples = None
    if needed(ctx)[_SAMPLES]:
        of_samples = sample_gradients(grads, read, indices, offsets, paddings, last)
    chosen = tables_with_gradient(grads, len(weights))
    batch, ctx.batch = getattr(ctx, "batch", None), None  # it holds memory
    is_plain_update = len(chosen) == len(weights) and is_plain(grads)
    # With hooks, the saved tensors may be others than the batch's.
    if batch is not None and is_plain_update and not ctx.are_hooked:
        of_all: Any = grads
        _update_rows(weights, of_all, batch, means, paddings, chosen, rule)
    else:
        before = None if batch is None else batch.tables
        check_again(ctx, weights, indices, offsets, last, before)
        lists = weights, grads, indices, offsets, samples, means, paddings
        arguments = chosen_of(chosen, len(weights), *lists)
        _update_tables(*arguments, chosen, last, rule)
        increment_version(arguments[0])  # for a tracer, which runs no kernel
    return [None, None, None, None, of_samples, None, None, None, None]


_updated_bags = register(
    "updated_embedding_bags(Tensor anchor, Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "Tensor[] per_sample_weights, bool[] means, int[] paddings, bool last, int rule) -> Tensor[]",
    kernel=_forward,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
    direct=_direct,
)


def updated_embedding_bags(
    anchor: Tensor,
    weights: Tensors,
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
        indices: the indices, as :func:`embedding_bags` takes them.
        offsets: the offsets, as :func:`embedding_bags` takes them.
        samples: the sample weights, as :func:`embedding_bags` takes them.
        means: whether each table's bags are means.
        paddings: the index of each table that is ignored, or -1.
        last: whether offsets include where the last bag ends.
        rule: the number of the rule that updates the tables (:func:`numbered`).
    """
    bags = as_lists(indices, offsets, samples)
    result: list[Tensor] = _updated_bags(anchor, weights, *bags, means, paddings, last, rule)
    return result
