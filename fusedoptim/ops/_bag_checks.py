"""Checks of what embedding bags accept, and of which index or offset was wrong."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim.ops._arguments import as_integer, check_bool
from fusedoptim.ops._bag_gradients import by_table
from fusedoptim.ops._launching import ARITHMETIC_OF, DTYPE_NAMES, VARIANT_OF

_MOST_ROWS = 1 << 31
"""The most rows of a table: a row's number is the upper half of a sorted key."""
_INTEGERS = (torch.int32, torch.int64)
_BOOLS = frozenset((bool,))
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

Tensors = Sequence[Tensor]


def check_batch(
    weights: Tensors,
    indices: Tensors,
    offsets: Tensors,
    samples: Tensors,
    means: Sequence[bool],
    last: bool,
    have_known_kinds: bool = False,
) -> None:
    """Raise if the operator does not accept these bags of the tables; no values are read.

    ``have_known_kinds`` says that devices, dtypes and dimensions of integers need no check.
    """
    tables = len(weights)
    is_joined = len(indices) == 1
    check_counts(weights, indices, offsets)
    if not have_known_kinds:
        _check_integers(indices, offsets, weights[0].device)
    if last and not all(map(Tensor.numel, offsets)):
        t = [starts.numel() for starts in offsets].index(0)
        raise RuntimeError(  # as torch
            f"embedding_bags: offsets {t} are empty; with include_last_offset pass one or more"
        )
    if is_joined and (offsets[0].numel() - last) % tables:
        raise ValueError(
            f"embedding_bags: there are {offsets[0].numel() - last} bags for {tables} tables; pass "
            "equally many for each table"
        )
    _check_samples(weights, indices, samples, means)


def check_counts(weights: Tensors, indices: Tensors, offsets: Tensors) -> None:
    """Raise unless there are indices and offsets of each table, or of all."""
    tables = len(weights)
    if len(indices) not in (1, tables) or len(offsets) != len(indices):
        raise ValueError(
            f"embedding_bags: there are {tables} tables, {len(indices)} tensors of indices and "
            f"{len(offsets)} of offsets; pass lists with one of each per table, or one for all"
        )


def as_lists(
    indices: Any, offsets: Any, samples: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Lists of the given tensors; TypeError for anything else."""
    return (
        _of_bags("indices", indices),
        _of_bags("offsets", offsets),
        _of_bags("per_sample_weights", samples),
    )


def _of_bags(what: str, given: Any) -> list[Tensor]:
    if isinstance(given, Tensor) and given.dim() == 1:
        raise TypeError(
            f"embedding_bags: {what} are one tensor; pass a list with it, which is then for all "
            "tables"
        )
    return as_list(what, given)


def as_list(what: str, given: Any) -> list[Tensor]:
    """A list of the given tensors; TypeError for anything else."""
    if not isinstance(given, Iterable):
        raise TypeError(
            f"embedding_bags: {what} are of type {type(given).__name__}; pass a list of tensors"
        )
    found = list(given)
    if not _PLAIN.issuperset(map(type, found)):
        for t, value in enumerate(found):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"embedding_bags: {what} {t} are of type {type(value).__name__}; pass a "
                    "tensor, such as torch.as_tensor of them"
                )
    return found


def options_of_tables(
    weights: Tensors, mean: Any, padding_idx: Any
) -> tuple[list[bool], list[int]]:
    """Whether each table's bags are means, and which index it ignores, or -1.

    Raises unless each table has a mode, and a padding that is one of its rows, or None.
    """
    tables = len(weights)
    means = [mean] * tables if isinstance(mean, bool) else _options("mean", mean, tables)
    if not _BOOLS.issuperset(map(type, means)):
        for t, option in enumerate(means):
            check_bool("embedding_bags", f"mean[{t}]", option)
    if padding_idx is None:
        return means, [-1] * tables
    paddings = _options("padding_idx", padding_idx, tables)
    return means, [_row(t, *pair) for t, pair in enumerate(zip(paddings, weights))]


def _options(name: str, given: Any, tables: int) -> list[Any]:
    """What was given as a list with an option for each table."""
    if not isinstance(given, Iterable) or isinstance(given, str):
        for_all = "True or False, or " if name == "mean" else ""
        raise TypeError(
            f"embedding_bags: {name}={given!r} is of type {type(given).__name__}; pass {for_all}a "
            "list with one for each table"
        )
    options = list(given)
    if len(options) != tables:
        raise ValueError(
            f"embedding_bags: {name} has {len(options)} for {tables} tables; pass one for each"
        )
    return options


def _row(t: int, padding: Any, weight: Tensor) -> int:
    """The row that ``padding`` is, counted from the table's end if it is negative, or -1."""
    if padding is None:
        return -1
    row, rows = as_integer("embedding_bags", f"padding_idx[{t}]", padding), weight.shape[0]
    if not -rows <= row < rows:
        raise RuntimeError(  # as torch
            f"embedding_bags: padding_idx of table {t} is {row}, and it has {rows} rows; "
            f"pass one from {-rows} to {rows - 1}, or None"
        )
    return row % rows


def check_weights(weights: Tensors) -> None:
    """Raise if the operators do not accept these tables."""
    if not weights:
        raise ValueError("embedding_bags: there are no tables; pass at least one weight")
    first = weights[0]
    if first.dtype not in VARIANT_OF:
        raise TypeError(
            f"embedding_bags: weights have dtype {first.dtype}, and kernels compute with "
            f"{DTYPE_NAMES}; convert them"
        )
    kinds = {(w.dtype, w.dim(), w.device) for w in weights}
    if kinds != {(first.dtype, 2, first.device)}:
        _check_alike(weights)
    most = max([weight.shape[0] for weight in weights])
    if most > _MOST_ROWS:
        raise ValueError(
            f"embedding_bags: a table has {most} rows; at most {_MOST_ROWS} are supported"
        )


def check_updated(weights: Tensors, sums: Tensors, trails: Tensors, is_rowwise: bool) -> None:
    """Raise unless a kernel can update these tables and their state in place.

    Args:
        weights: the tables.
        sums: Adagrad's state, or none.
        trails: the lower halves of split tables, or none.
        is_rowwise: whether there is one sum for each row.
    """
    for t, weight in enumerate(weights):
        check_contiguous(t, weight)
        if trails and weight.dtype != torch.bfloat16:
            raise RuntimeError(
                f"MergedEmbeddingBag: table {t} is split, and its upper half has become "
                f"{weight.dtype}; keep split tables torch.bfloat16, or convert them before a "
                "MergedEmbeddingBag is constructed"
            )
        shape = weight.shape[:1] if is_rowwise else weight.shape
        for name, states, dtype, wanted in (
            ("sum", sums, ARITHMETIC_OF[weight.dtype], shape),
            ("trail", trails, torch.int16, weight.shape),
        ):
            if states:
                _check_state(f"the {name!r} of table {t}", states[t], dtype, wanted, weight.device)


def check_contiguous(t: int, weight: Tensor) -> None:
    """Raise unless a kernel can update the table in place."""
    if not weight.is_contiguous():
        raise ValueError(
            f"MergedEmbeddingBag: table {t} has strides {weight.stride()}; the update takes "
            "contiguous ones: use weight.data = weight.data.contiguous()"
        )


def _check_state(
    what: str, state: Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> None:
    if (state.dtype, state.shape, state.device) != (dtype, shape, device):
        raise RuntimeError(
            f"MergedEmbeddingBag: {what} is {state.dtype} of shape {tuple(state.shape)} on "
            f"{state.device}, and the table now needs {dtype} of shape {tuple(shape)} on {device}; "
            "for another dtype or device, load optimizer().state_dict() into optimizer(), which "
            "converts the state; for another shape, construct a new MergedEmbeddingBag"
        )
    if not state.is_contiguous():
        raise RuntimeError(
            f"MergedEmbeddingBag: {what} has strides {state.stride()}; the update takes contiguous "
            "state: load optimizer().state_dict() into optimizer()"
        )


def _check_alike(weights: Tensors) -> None:
    first = weights[0]
    for t, weight in enumerate(weights):
        if weight.dtype != first.dtype:
            raise TypeError(
                f"embedding_bags: weight {t} has dtype {weight.dtype}, and weight 0 has "
                f"{first.dtype}; convert them to one, or call the operator for each dtype"
            )
        if weight.dim() != 2:
            raise ValueError(
                f"embedding_bags: weight {t} has shape {tuple(weight.shape)}; pass (rows, width)"
            )
        _check_device(f"weight {t} is", weight, first.device)


def _check_integers(indices: Tensors, offsets: Tensors, device: torch.device) -> None:
    for what, tensors in (("indices", indices), ("offsets", offsets)):
        for t, tensor in enumerate(tensors):
            if tensor.dtype not in _INTEGERS or tensor.dim() != 1:
                raise TypeError(
                    f"embedding_bags: {what} {t} are {tensor.dtype} of shape "
                    f"{tuple(tensor.shape)}; pass int32 or int64 of one dimension"
                )
            _check_device(f"{what} {t} are", tensor, device)


def _check_device(what: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(
            f"embedding_bags: {what} on {tensor.device}; move to {device}, weight 0's device"
        )


def _check_samples(
    weights: Tensors, indices: Tensors, samples: Tensors, means: Sequence[bool]
) -> None:
    if not samples:
        return
    if any(means):
        raise ValueError(
            "embedding_bags: per_sample_weights are for sums, and table "
            f"{list(means).index(True)} has means; use mode='sum', or leave them out"
        )
    if len(samples) != len(indices):
        raise ValueError(
            f"embedding_bags: there are {len(samples)} tensors of per_sample_weights and "
            f"{len(indices)} of indices; pass one for each"
        )
    for t, (values, own) in enumerate(zip(samples, indices)):
        if values.shape != own.shape:
            raise ValueError(
                f"embedding_bags: per_sample_weights {t} have shape {tuple(values.shape)}, and the "
                f"indices have {tuple(own.shape)}; pass one for each index"
            )
        if values.dtype != weights[0].dtype:
            raise TypeError(
                f"embedding_bags: per_sample_weights {t} have dtype {values.dtype}; convert them "
                f"to {weights[0].dtype}, the weights'"
            )
        _check_device(f"per_sample_weights {t} are", values, weights[0].device)


def check_values(weights: Tensors, indices: Tensors, offsets: Tensors, last: bool) -> None:
    """Raise for the first wrong offset or index, if there is one; all must be on the CPU."""
    for t, starts in enumerate(offsets):
        limit = len(indices[t])
        if len(starts) and starts[0] != 0:
            raise RuntimeError(
                f"embedding_bags: offset 0 of offsets {t} is {int(starts[0])}; it has to be 0, as "
                "the first bag begins with the first index"
            )
        wrong = (starts[1:] < starts[:-1]) | (starts[1:] > limit)
        if bool(wrong.any()):
            _raise_offset(t, 1 + int(wrong.nonzero()[0]), starts, limit)
    own, whole = by_table(indices, offsets, len(weights), last)
    for t, (values, starts) in enumerate(zip(own, whole)):
        used = values[int(starts[0]) : int(starts[-1])]
        wrong = (used < 0) | (used >= len(weights[t]))
        if bool(wrong.any()):
            position = int(wrong.nonzero()[0])
            rows = len(weights[t])
            cure = f"pass indices from 0 to {rows - 1}" if rows else "leave its bags empty"
            raise IndexError(
                f"embedding_bags: table {t} has {rows} rows, and its index "
                f"{position + int(starts[0])} is {int(used[position])}; {cure}"
            )


def _raise_offset(t: int, position: int, offsets: Tensor, limit: int) -> None:
    before = int(offsets[position - 1])
    raise RuntimeError(
        f"embedding_bags: offset {position} of offsets {t} is {int(offsets[position])}, but the "
        f"previous offset is {before} and there are {limit} indices; offsets must not decrease or "
        "exceed the number of indices"
    )
