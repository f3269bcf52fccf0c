"""What MergedEmbeddingBag accepts as tables, and as bags of a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim.ops._arguments import as_integer, check_bool

_MODES = ("sum", "mean")
OPTIONS = (
    "mode",
    "padding_idx",
    "max_norm",
    "scale_grad_by_freq",
    "include_last_offset",
    "sparse",
)
"""The options of a bag on which its results and gradients depend."""


def as_bag(t: int, table: Any) -> torch.nn.EmbeddingBag:
    """A table of the constructor as a bag; raise if it cannot be merged."""
    if isinstance(table, (tuple, list)) and len(table) == 2:
        return torch.nn.EmbeddingBag(table[0], table[1], mode="sum")
    if not isinstance(table, torch.nn.EmbeddingBag):
        raise TypeError(
            f"MergedEmbeddingBag: table {t} is of type {type(table).__name__}; pass an "
            "EmbeddingBag, or the number of rows and the width"
        )
    if table.mode not in _MODES:
        raise ValueError(
            f"MergedEmbeddingBag: table {t} has mode={table.mode!r}; only 'sum' and 'mean' can be "
            "merged; leave this table out"
        )
    for name in ("max_norm", "scale_grad_by_freq"):
        if getattr(table, name):
            raise ValueError(
                f"MergedEmbeddingBag: table {t} has {name}={getattr(table, name)!r}; leave this "
                f"table out, or construct it without {name}"
            )
    for name in ("include_last_offset", "sparse"):
        check_bool(f"MergedEmbeddingBag: table {t}", name, getattr(table, name))
    if table.padding_idx is not None:
        as_integer(f"MergedEmbeddingBag: table {t}", "padding_idx", table.padding_idx)
    return table


def options_of(bag: torch.nn.EmbeddingBag) -> tuple[Any, ...]:
    """The values of :data:`OPTIONS`; torch.compile does not trace ``operator.attrgetter``."""
    return (
        bag.mode,
        bag.padding_idx,
        bag.max_norm,
        bag.scale_grad_by_freq,
        bag.include_last_offset,
        bag.sparse,
    )


def check_alike(bags: Sequence[torch.nn.EmbeddingBag]) -> None:
    """Raise unless there are bags, and all have the same options and dtype."""
    if not bags:
        raise ValueError("MergedEmbeddingBag: tables=[] is empty; pass at least one")
    for name in ("include_last_offset", "sparse"):
        values = [getattr(bag, name) for bag in bags]
        if len(set(values)) > 1:
            t = values.index(not values[0])
            raise ValueError(
                f"MergedEmbeddingBag: table {t} has {name}={values[t]}, and table 0 has "
                f"{values[0]}; use the same value for all tables"
            )
    for t, bag in enumerate(bags):
        if bag.weight.dtype != bags[0].weight.dtype:
            raise TypeError(
                f"MergedEmbeddingBag: table {t} has dtype {bag.weight.dtype}, and table 0 has "
                f"{bags[0].weight.dtype}; convert them, or merge tables of each dtype separately"
            )


def in_lists(
    indices: Any, offsets: Any, samples: Any, tables: int, has_last_offset: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The arguments of forward as the operators take them."""
    if isinstance(indices, Tensor):
        if not isinstance(offsets, Tensor):
            raise TypeError(
                f"MergedEmbeddingBag: input is one tensor and offsets are a "
                f"{type(offsets).__name__}; pass one tensor for each, or lists"
            )
        return [indices], [offsets], [] if samples is None else [samples]
    if not isinstance(indices, Iterable):
        raise TypeError(
            f"MergedEmbeddingBag: input is of type {type(indices).__name__}; pass one tensor, or a "
            "list with one for each table"
        )
    indices = list(indices)
    offsets = [None] * tables if offsets is None else list(offsets)
    samples = [None] * tables if samples is None else list(samples)
    if not len(indices) == len(offsets) == len(samples) == tables:
        raise ValueError(
            f"MergedEmbeddingBag: there are {tables} tables, {len(indices)} inputs, "
            f"{len(offsets)} offsets and {len(samples)} per_sample_weights; pass one for each table"
        )
    for t, starts in enumerate(offsets):
        if starts is None:
            indices[t], offsets[t], samples[t] = _from_rows(
                t, indices[t], samples[t], has_last_offset
            )
    if all(values is None for values in samples):
        return indices, offsets, []
    if any(values is None for values in samples):
        raise ValueError(
            "MergedEmbeddingBag: some tables have per_sample_weights and others None; pass ones, "
            "such as torch.ones(len(input))"
        )
    return indices, offsets, samples


def _from_rows(
    t: int, indices: Any, samples: Any, has_last_offset: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Indices, offsets and samples of table ``t``, given without offsets: a bag in each row."""
    if not isinstance(indices, Tensor):
        raise TypeError(
            f"MergedEmbeddingBag: input {t} is of type {type(indices).__name__}; pass a tensor"
        )
    if indices.dim() != 2:
        raise ValueError(
            f"MergedEmbeddingBag: input {t} has shape {tuple(indices.shape)} and no offsets; "
            "pass offsets, or a two-dimensional input with a bag in each row"
        )
    rows, columns = indices.shape
    offsets = columns * torch.arange(rows + int(has_last_offset), device=indices.device)
    if samples is None:
        return indices.reshape(-1), offsets, None
    if samples.shape != indices.shape:
        raise ValueError(
            f"MergedEmbeddingBag: per_sample_weights {t} have shape {tuple(samples.shape)}, and "
            f"input {t} has {tuple(indices.shape)}; pass one for each index, in the input's shape"
        )
    return indices.reshape(-1), offsets, samples.reshape(-1)
