r"""Bags of several embedding tables as one operator, whose backward pass may update the tables."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedoptim._torch_private import (
    BelowAutograd,
    is_batched,
    saved_tensors_hooks,
    tracing_state,
)
from fusedoptim.launch.devices import is_on_host
from fusedoptim.ops._arguments import check_bool
from fusedoptim.ops._bag_batch import (
    MOST_KEPT,
    Batch,
    Cut,
    Shape,
    addresses_of,
    cut_of,
)
from fusedoptim.ops._bag_checks import (
    as_list,
    as_lists,
    check_batch,
    check_counts,
    check_values,
    check_weights,
    options_of_tables,
)
from fusedoptim.ops._bag_gradients import (
    batched_gradients,
    chosen_of,
    sample_gradients,
    sparse_gradients,
    tables_with_gradient,
)
from fusedoptim.ops._bag_rows import Gradient, columns_before
from fusedoptim.ops._bag_tables import Tables, tables_of
from fusedoptim.ops._launching import DEVICES, TableLaunch
from fusedoptim.ops._registering import is_plain, needed, register
from fusedoptim.ops._traced_bags import traced_bags

__all__ = ["embedding_bags"]

Tensors = Sequence[Tensor]


def embedding_bags(
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    per_sample_weights: Tensors = (),
    *,
    mean: Sequence[bool] | bool = False,
    padding_idx: Sequence[int | None] | None = None,
    include_last_offset: bool = False,
    sparse: bool = False,
) -> list[Tensor]:
    r"""The bags of several embedding tables.

    .. math::
        y_{tb} = \sum_{k = o_{tb}}^{o_{t,b+1} - 1} v_{tk}\,w_{t,i_{tk}}

    For a mean, the sum is divided by the number of its terms; a bag without terms is zero.

    Args:
        weights: :math:`w`, the tables: float32, float64, bfloat16 or float16, all of one dtype, of
            shape (rows, width).
        indices: :math:`i`, int32 or int64: for each table, the indices of all its bags. Or a list
            of one tensor with those of all tables, one table after another.
        offsets: :math:`o`, int32 or int64: for each table, where its bags begin in its indices. Or
            a list of one tensor with equally many bags for each table, one table after another,
            which all count from the beginning of the indices.
        per_sample_weights: :math:`v`, of the weights' dtype, in the form of ``indices``; 1 if left
            out.
        mean: whether the bags of each table, or of all, are means.
        padding_idx: for each table, the index that is ignored, or None. A negative one counts from
            the table's end.
        include_last_offset: whether each tensor of ``offsets`` has one more, where the last bag
            ends. Otherwise that bag ends at the end of the indices.
        sparse: whether the gradients of the tables are sparse.

    Returns:
        for each table its bags, of shape (bags, width); or, for one tensor of ``indices``, a list
        of one tensor of shape (bags, sum of the widths).

    Raises:
        IndexError: on the CPU, an index is not a row of its table. On a GPU, a check would have to
            wait for the device, so nothing is raised: bags near the index are zero, and the
            backward pass reads and writes outside the table. Check indices that may be wrong
            beforehand.
        RuntimeError: a ``padding_idx`` is not a row of its table; on the CPU, the first offset is
            not 0, or an offset is less than the previous one or more than the number of indices.
            On a GPU, a wrong offset acts like a wrong index.
        ValueError: a shape or a device does not fit, or ``mean`` or ``padding_idx`` does not have
            one entry for each table.
        TypeError: something is not a tensor, a dtype that no kernel takes, or dtypes that differ;
            or an option is not of the type above.

    Example:
        >>> import torch
        >>> tables = [torch.ones(4, 2), torch.ones(5, 3)]
        >>> indices = [torch.tensor([0, 1, 3]), torch.tensor([4])]
        >>> offsets = [torch.tensor([0, 1]), torch.tensor([0, 0])]
        >>> for bags in embedding_bags(tables, indices, offsets):
        ...     print(bags)
        tensor([[1., 1.],
                [2., 2.]])
        tensor([[0., 0., 0.],
                [1., 1., 1.]])

    Semantics: ``torch.nn.functional.embedding_bag`` of torch 2.13, for each table. Gradients are
    summed in the order of the indices, so they have the same bits on any number of threads.
    """
    tables = as_list("weights", weights)
    check_bool("embedding_bags", "include_last_offset", include_last_offset)
    check_bool("embedding_bags", "sparse", sparse)
    options = *options_of_tables(tables, mean, padding_idx), include_last_offset, sparse
    return bags_of_tables(tables, indices, offsets, per_sample_weights, *options)


def bags_of_tables(
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
    sparse: bool,
) -> list[Tensor]:
    """:func:`embedding_bags` with options as the operator takes them, for each table.

    Args:
        weights: the tables.
        indices: the indices, as :func:`embedding_bags` takes them.
        offsets: the offsets, as :func:`embedding_bags` takes them.
        samples: the sample weights, as :func:`embedding_bags` takes them.
        means: whether each table's bags are means.
        paddings: the index of each table that is ignored, or -1.
        last: whether offsets include where the last bag ends.
        sparse: whether the gradients of the tables are sparse.
    """
    inputs = weights, *as_lists(indices, offsets, samples), means, paddings, last, sparse
    if not torch.compiler.is_compiling() and tracing_state() is not None:
        check_counts(*inputs[:3])
        return traced_bags(*inputs)
    result: list[Tensor] = _embedding_bags(*inputs)
    return result


def batch_of(
    tables: Tables,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    last: bool,
    is_read_directly: bool = False,
) -> Batch:
    real = [values.to(tables.real).contiguous() for values in samples]
    return Batch(indices, offsets, real, tables, last, is_read_directly)


class _Sums:
    """The launch of the forward pass, for batches of the same shape and options."""

    def __init__(
        self,
        tables: Tables,
        shape: Shape,
        cut: Cut,
        paddings: tuple[int, ...],
        means: tuple[bool, ...],
        is_weighted: bool,
    ) -> None:
        widths, (begin, end) = tables.widths, cut.bounds(shape.bags)
        self.table = of = cut.tables(len(widths))
        """The table of each row of the launch."""
        self.tensor = shape.tensor[of]
        """The tensor with the row's indices."""
        self.offset = 8 * (shape.before[of] + begin)
        """Bytes before the row's offsets in their tensor."""
        strides = np.full(len(widths), widths.sum()) if shape.is_joined else widths
        self.output = columns_before(widths, shape.is_joined)[of] + begin * strides[of]
        self.output *= tables.itemsize
        """Bytes before the row's bags in their tensor."""
        columns = {
            "length": np.full(len(of), cut.length),
            "bags": end - begin,
            "bags_left": shape.bags_left[of] - begin,
            "table_rows": np.array(tables.rows)[of],
            "width": widths[of],
            "stride": strides[of],
            "padding": np.array(paddings)[of],
            "is_first": self.offset == 0,
            "is_weighted": int(is_weighted),
            "is_mean": np.array(means, np.int64)[of],
        }
        if not is_weighted:
            columns["weights"] = 0
        self.launch = TableLaunch("embedding_bag", tables.device, tables.variant, columns)


_sums_of = functools.lru_cache(MOST_KEPT)(_Sums)


def bags_and_batch(
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
    *_: Any,
) -> tuple[list[Tensor], Batch]:
    """The results, and what the backward pass needs to know about the bags."""
    tables, integers = tables_of(weights), [*indices, *offsets]
    known = tables.known(integers)
    check_batch(weights, indices, offsets, samples, means, last, known is not None)
    if known is None:
        known = tables.remember(integers)
    batch = batch_of(tables, indices, offsets, samples, last, known.are_read_directly)
    outputs = _new_outputs(weights[0], tables.widths.tolist(), batch.shape.bags_of_tensor)
    can_check = is_on_host(tables.device)  # a GPU would have to be waited for
    if not any(map(Tensor.numel, outputs)):
        if can_check:
            check_values(weights, indices, offsets, last)
        return outputs, batch
    dense = weights if tables.are_contiguous else [weight.contiguous() for weight in weights]
    options = tuple(paddings), tuple(means), bool(samples)
    sums = _sums_of(tables, batch.shape, cut_of(tables, batch.mean_sizes()), *options)
    faults = torch.zeros(1, dtype=torch.int64, device=tables.device)
    columns = batch.addresses(sums.tensor)
    columns["offsets"] += sums.offset
    columns["count"] = batch.ends[sums.table]
    columns["table"] = addresses_of(dense)[sums.table]
    columns["output"] = addresses_of(outputs)[sums.tensor] + sums.output
    columns["faults"] = addresses_of([faults])
    sums.launch.run(columns, {})
    if can_check and faults:
        check_values(weights, indices, offsets, last)
    return outputs, batch


def _direct(ctx: Any, *inputs: Any) -> list[Tensor]:
    with BelowAutograd():
        bags, batch = bags_and_batch(*inputs)
    if ctx is not None:
        ctx.tables = batch.tables
    return bags


def compute_bags(*inputs: Any) -> list[Tensor]:
    """Only the results of :func:`bags_and_batch`."""
    return bags_and_batch(*inputs)[0]


def new_bags(
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
    *_: Any,
) -> list[Tensor]:
    """The results, uninitialized; raise if the operator does not accept these arguments."""
    check_weights(weights)
    check_batch(weights, indices, offsets, samples, means, last)
    repeats = len(weights) // len(offsets)
    bags = [(starts.shape[0] - int(last)) // repeats for starts in offsets]
    return _new_outputs(weights[0], [weight.shape[1] for weight in weights], bags)


def _new_outputs(like: Tensor, widths: Sequence[int], bags: Sequence[int]) -> list[Tensor]:
    """A tensor for the bags of each table, or one for those of all."""
    if len(bags) < len(widths):
        return [like.new_empty(bags[0], sum(widths))]
    return [like.new_empty(count, width) for count, width in zip(bags, widths)]


def _dense_gradients(
    grads: Tensors,
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    paddings: Sequence[int],
    last: bool,
) -> list[Tensor]:
    results = [
        torch.zeros_like(weight, memory_format=torch.contiguous_format) for weight in weights
    ]
    tables = tables_of(weights)
    batch = batch_of(tables, indices, offsets, samples, last)
    gradient = Gradient(grads, batch, means, paddings)
    gradient.walk("sum_rows", tables.variant, {"result": results}, {})
    return results


_dense_gradients_of: Any = torch.library.custom_op(  # which raises where it is differentiated
    "fusedoptim::embedding_bags_dense_gradients",
    _dense_gradients,
    mutates_args=(),
    device_types=DEVICES,
    schema="(Tensor[] grads, Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "Tensor[] per_sample_weights, bool[] means, int[] paddings, bool last) -> Tensor[]",
)
_dense_gradients_of.register_fake(
    lambda grads, weights, *_: [
        torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights
    ]
)


def _setup_context(ctx: Any, inputs: Sequence[Any], output: Tensors) -> None:
    # Not saved, as only gradients of sample weights need the values; torch saves no more.
    ctx.weights, indices, offsets, samples, *ctx.options = inputs
    read = ctx.weights if samples and needed(ctx)[3] else []
    save_lists(ctx, read, indices, offsets, samples)


def save_lists(ctx: Any, *lists: Tensors) -> None:
    """Save lists of tensors for the backward pass, which gets them from :func:`saved_lists`."""
    ctx.counts = list(map(len, lists))
    ctx.save_for_backward(*itertools.chain(*lists))
    ctx.are_hooked = saved_tensors_hooks(False) is not None


def saved_lists(ctx: Any) -> list[Tensors]:
    tensors, lists, start = ctx.saved_tensors, [], 0
    for count in ctx.counts:
        lists.append(tensors[start : start + count])
        start += count
    return lists


def _backward(ctx: Any, *grads: Tensor | None) -> list[Any]:
    weights, (read, indices, offsets, samples) = ctx.weights, saved_lists(ctx)
    means, paddings, last, sparse = ctx.options
    check_again(ctx, weights, indices, offsets, last, getattr(ctx, "tables", None))
    needs_weights, _, _, needs_samples, *_ = needed(ctx)
    of_samples = None
    if needs_samples:
        of_samples = sample_gradients(grads, read, indices, offsets, paddings, last)
    of_weights: list[Tensor | None] | None = None
    if needs_weights:
        of_weights = [None] * len(weights)
        chosen = tables_with_gradient(grads, len(weights))
        lists = grads, weights, indices, offsets, samples, means, paddings
        arguments = chosen_of(chosen, len(weights), *lists)
        gradients: Any = _dense_gradients_of
        if sparse:
            gradients = sparse_gradients
        elif any(map(is_batched, arguments[0])):
            gradients = batched_gradients
        for t, gradient in zip(chosen, gradients(*arguments, last)):
            of_weights[t] = gradient if needs_weights[t] else None
    return [of_weights, None, None, of_samples, None, None, None, None]


def check_again(
    ctx: Any,
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    last: bool,
    before: Tables | None,
) -> None:
    """Raise if what the forward pass has checked may no longer hold.

    Args:
        ctx: the context of the backward pass.
        weights: the tables.
        indices: the indices that were saved.
        offsets: the offsets that were saved.
        last: whether offsets include where the last bag ends.
        before: what the tables were; None if the forward pass was no plain call.
    """
    if before is not None:
        check_like(tables_of(weights), before)
    # Without hooks, autograd has noticed if saved tensors were changed.
    if ctx.are_hooked and is_plain(indices, offsets) and is_on_host(weights[0].device):
        check_values(weights, indices, offsets, last)


def check_like(tables: Tables, before: Tables) -> None:
    """Raise unless tables are as in the forward pass."""
    if not tables.is_like(before):
        raise RuntimeError(
            "embedding_bags: a table's shape, dtype or device changed between the forward and the "
            "backward pass; change tables before the forward pass"
        )


_embedding_bags = register(
    "embedding_bags(Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "Tensor[] per_sample_weights, bool[] means, int[] paddings, bool last, bool sparse) "
    "-> Tensor[]",
    kernel=compute_bags,
    fake=new_bags,
    setup_context=_setup_context,
    backward=_backward,
    direct=_direct,
)
