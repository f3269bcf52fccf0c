"""``merge_embedding_bags``: one module that computes all embedding bags of a list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.nn._single_bags import check_apart, check_plain, check_stored, check_trainable
from transforms.inputs.arguments import check_in_place, check_model, check_not_for_inference
from transforms.inputs.copies import copy_pair
from transforms.reports import Entry, Report, conclude, find, title_of
from transforms.reports import merged as with_earlier
from transforms.rewrites.merged_bags import merge
from transforms.rewrites.undoing import changes_to
from transforms.tracing.modules import has_hooks, owners

__all__ = ["merge_embedding_bags"]

KNOB = "merge_embedding_bags"
"""The name of what is done here in the report."""
_OF_STATE = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

_Model = TypeVar("_Model", bound=nn.Module)


@torch.inference_mode(False)
def merge_embedding_bags(
    model: _Model,
    name: str,
    *,
    optimizer: str | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    eps: float | None = None,
    split: bool = False,
    inplace: bool = False,
) -> _Model:
    """Replace a list of embedding bags in a model by one :class:`fusedoptim.nn.MergedEmbeddingBag`.

    The merged module contains the bags under the same names in ``state_dict()``, and can be indexed
    and iterated over. A forward that loops over the bags gives the same results, but is not faster:
    call the merged module instead, as ``self.tables(indices, offsets)`` with lists, which returns a
    list. :func:`transforms.restore` undoes the merge, and keeps what the tables learned.

    With ``optimizer``, the backward pass of the merged module updates the tables. They have no
    gradients, so leave them out of the optimizer of the model. A ``GradScaler``, the clipping or
    accumulation of gradients, and ``DistributedDataParallel`` do not work with this: see
    :class:`fusedoptim.nn.MergedEmbeddingBag`. Calling a single bag in training mode with gradients
    enabled raises, as that bag would learn nothing.

    Args:
        model: a module on one device.
        name: the name of a ``torch.nn.ModuleList`` in the model, or of an attribute that is a list
            or tuple, such as "tables" or "sparse.tables". It holds plain ``torch.nn.EmbeddingBag``.
        optimizer: None, "sgd", "adagrad" or "rowwise_adagrad".
        lr: learning rate; by default 0.01.
        weight_decay: L2 penalty of the rows in a batch; by default 0.
        eps: added to Adagrad's divisor, to keep it from zero; by default 1e-10.
        split: keep the tables as two halves of 16 bits; needs an optimizer.
        inplace: rewrite the given model. Otherwise it is copied: make optimizers for the copy.

    Returns:
        the model.

    Raises:
        AttributeError: the model has nothing of that name.
        TypeError: the name is not that of a list of plain embedding bags, or their dtypes differ;
            or the model cannot be rewritten or copied.
        ValueError: a bag has ``max_norm``, ``scale_grad_by_freq``, hooks, a computed weight or a
            mode other than "sum" and "mean"; with an optimizer, a table is frozen, has hooks or is
            used by something else, or, with ``inplace``, has a gradient; or an option has no
            effect. Whatever is raised, nothing was changed.

    Example:
        >>> import torch
        >>> from fusedoptim import transforms
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         bags = [torch.nn.EmbeddingBag(10, 4, mode="sum") for _ in range(3)]
        ...         self.tables = torch.nn.ModuleList(bags)
        ...     def forward(self, indices, offsets):
        ...         if isinstance(self.tables, torch.nn.ModuleList):
        ...             bags = zip(self.tables, indices, offsets)
        ...             return torch.cat([bag(i, o) for bag, i, o in bags], dim=1)
        ...         return torch.cat(self.tables(indices, offsets), dim=1)
        >>> model = transforms.merge_embedding_bags(Model(), "tables", optimizer="sgd", lr=0.1)
        >>> indices, offsets = [torch.tensor([0, 3, 3])] * 3, [torch.tensor([0, 2])] * 3
        >>> model(indices, offsets).sum().backward()  # updates rows 0 and 3 of all tables
        >>> [entry.where for entry in transforms.report(model).done("merge_embedding_bags")]
        ['tables']
        >>> type(transforms.restore(model).tables).__name__
        'ModuleList'

    Semantics: ``torch.nn.EmbeddingBag`` of torch 2.13. IPEX's ``from_embeddingbag_list`` made such
    a module, but the user had to put it into the model.
    """
    check_model(model)
    if optimizer is not None:
        check_not_for_inference(model)
    _check_bags(model, name, is_trained=optimizer is not None)
    if inplace:
        check_in_place(model, None)
    else:
        model, _ = copy_pair(model, None)
    options = {
        "optimizer": optimizer,
        "lr": lr,
        "weight_decay": weight_decay,
        "eps": eps,
        "split": split,
    }
    parent, attribute = _place(model, name)
    if optimizer is not None and not inplace:
        for bag in getattr(parent, attribute):
            bag.weight.grad = None  # a copy; the model's optimizer applies its own
    with changes_to(model) as undo:
        merged = merge(parent, attribute, name, options, undo)
        how = "" if optimizer is None else f", and updated in backward by {optimizer}"
        entry = Entry(name, f"{len(merged)} tables in one call of {name}(indices, offsets){how}")
        conclude(model, _report(model, [entry, *mergeable(model)]), undo)
    return model


def mergeable(model: nn.Module) -> list[Entry]:
    """An entry for each ModuleList of bags that could be merged."""
    entries = []
    for name, module in model.named_modules():
        if name and isinstance(module, nn.ModuleList) and len(module) > 1:
            try:
                _check_bags(model, name, is_trained=False)
                MergedEmbeddingBag.from_embedding_bags([*module])
            except (AttributeError, TypeError, ValueError):
                continue
            what = f"its bags can be computed at once: see transforms.{KNOB}"
            entries.append(Entry(name, what, done=False))
    return entries


def _report(model: nn.Module, entries: Sequence[Entry]) -> Report:
    """The report of the model with these entries."""
    report = find(model)
    if report is None:
        report = Report(title_of(model), {}, kept_bytes=0)
    return with_earlier(model, report._replace(passes={KNOB: entries}))


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the named container, and the container's name there."""
    if not isinstance(name, str):
        raise TypeError(
            f"name={name!r} is of type {type(name).__name__}; pass a name, such as 'tables'"
        )
    path, _, attribute = name.rpartition(".")
    try:
        parent = model.get_submodule(path)
    except AttributeError as error:
        raise AttributeError(
            f"name={name!r}: {error}; named_modules() of the model has the names"
        ) from error
    if attribute not in parent._modules and attribute not in vars(parent):
        raise AttributeError(
            f"name={name!r}: this {type(parent).__name__} has no {attribute!r}; named_modules() "
            "of the model has the names"
        )
    return parent, attribute


def _check_bags(model: nn.Module, name: str, is_trained: bool) -> None:
    """Raise unless ``name`` is a list of plain bags, which can be trained if ``is_trained``.

    :class:`MergedEmbeddingBag` checks what all bags must have in common.
    """
    parent, attribute = _place(model, name)
    container: Any = getattr(parent, attribute)
    kind = type(container)
    if isinstance(container, MergedEmbeddingBag):
        raise TypeError(
            f"name={name!r} is a {kind.__name__} already; to merge its bags again, use "
            "transforms.restore(model) first"
        )
    if kind not in (nn.ModuleList, list, tuple):
        raise TypeError(
            f"name={name!r} is of type {kind.__name__}; name a torch.nn.ModuleList, a list or a "
            "tuple of torch.nn.EmbeddingBag"
        )
    if kind is nn.ModuleList and (
        has_hooks(container) or any(getattr(container, hooks) for hooks in _OF_STATE)
    ):
        raise ValueError(f"name={name!r}: the ModuleList has hooks; remove them first")
    sharers = owners(model) if is_trained else {}
    for t, bag in enumerate(container):
        where = f"{name}.{t}"
        _check_bag(where, bag)
        if is_trained:
            _check_trainable(where, bag, sharers.get(id(bag.weight), []))
    if is_trained:  # checked before copying: a copy of the model may no longer share the weight
        check_apart([bag.weight for bag in container], lambda t: f"{name}.{t}.weight")


def _check_bag(where: str, bag: Any) -> None:
    if isinstance(bag, nn.EmbeddingBag):
        check_stored(where, bag)
        check_plain(where, bag)
    if type(bag) is not nn.EmbeddingBag:
        raise TypeError(
            f"{where} is of type {type(bag).__name__}; only lists of torch.nn.EmbeddingBag itself "
            "are merged"
        )


def _check_trainable(where: str, bag: nn.EmbeddingBag, sharers: Sequence[str]) -> None:
    check_trainable(f"{where}.weight", bag.weight)
    others = [name or "the model" for name in sharers if name != where]
    if others:
        raise ValueError(
            f"{where}.weight is also a parameter of {', '.join(others)}, where it would get no "
            "gradient; merge without an optimizer"
        )
