"""Containers of embedding bags that one module replaces, and how that is undone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.nn.embedding_bag import is_frozen, optimizer_of, refuse_calls
from transforms.rewrites.undoing import Undo

Bags = nn.ModuleList | Sequence[nn.EmbeddingBag]

_MERGED = "_fusedoptim_merged_bags"
"""A parent's attribute that holds a :class:`_Merged` for each attribute that was merged."""


class _Merged(NamedTuple):
    container: Bags
    """The container that the merged module replaces."""
    dtypes: Sequence[torch.dtype]
    """The dtypes of the tables before they were split."""
    handles: Sequence[RemovableHandle]
    """The handles of the hooks that raise if one of the merged module's bags is called alone."""


def merge(
    parent: nn.Module, attribute: str, name: str, options: dict[str, Any], undo: Undo
) -> MergedEmbeddingBag:
    """Replace a container of bags by one module, which shares their parameters.

    Args:
        parent: the module that has the container.
        attribute: the container's name there.
        name: the container's name in the model.
        options: the options of :class:`MergedEmbeddingBag`.
        undo: gets a callback that reverts it.
    """
    container: Bags = getattr(parent, attribute)
    bags = [*container]
    dtypes = [bag.weight.dtype for bag in bags]
    # Made in two steps: the object exists, and can be undone, before its tables are split.
    merged = MergedEmbeddingBag.__new__(MergedEmbeddingBag)
    undo.callback(_release, merged, dtypes)
    merged.__init__(bags, **options)  # type: ignore[misc]  # it is of exactly this class
    merged.training = getattr(container, "training", parent.training)
    handles: Sequence[RemovableHandle] = []
    if options["optimizer"] is not None:
        call = f"self.{name.rpartition('.')[2]}(indices, offsets)"
        handles = refuse_calls(merged, name, call)
    record = _Merged(container, dtypes, handles)
    undo.callback(_revert, parent, attribute)  # first: an interrupt may follow each of these
    vars(parent).setdefault(_MERGED, {})[attribute] = record
    _put(parent, attribute, merged)
    return merged


def revert_all(model: nn.Module) -> None:
    """Give ``model`` all its containers back."""
    for module in [*model.modules()]:
        for attribute in [*vars(module).get(_MERGED, ())]:
            _revert(module, attribute)


def _revert(parent: nn.Module, attribute: str) -> None:
    """Give ``parent`` a container back, if it was merged."""
    records: dict[str, _Merged] = vars(parent).get(_MERGED, {})
    record = records.get(attribute)
    if record is not None:
        for handle in record.handles:
            handle.remove()
        merged = getattr(parent, attribute, None)
        if isinstance(merged, MergedEmbeddingBag):  # else the user has replaced it
            _release(merged, record.dtypes)
            if isinstance(record.container, nn.ModuleList):
                record.container.training = merged.training
            _put(parent, attribute, record.container)
        del records[attribute]
    if not records:
        vars(parent).pop(_MERGED, None)


def _release(merged: MergedEmbeddingBag, dtypes: Sequence[torch.dtype]) -> None:
    """Give the tables their original form, with their current values."""
    optimizer = optimizer_of(merged)
    if optimizer is None:
        return
    for bag, dtype in zip(merged, dtypes):
        if bag.weight in optimizer.halves and dtype == torch.float32:
            optimizer.halves.merge(bag.weight)
    is_trained = not is_frozen(merged)
    for bag in merged:
        bag.weight.requires_grad_(is_trained)


def _put(parent: nn.Module, attribute: str, value: object) -> None:
    """Set an attribute, at its place among the submodules if it is one."""
    own: dict[str, Any] = parent._modules if attribute in parent._modules else vars(parent)
    own[attribute] = value
