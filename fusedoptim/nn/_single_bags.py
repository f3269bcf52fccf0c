"""What bags do when they are called one by one, and a module that merges them would leave out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim._torch_private import HOOKS
from fusedoptim.step.tensors import update_order

_METHODS = ("forward", "__call__", "_call_impl")


def check_stored(where: str, bag: torch.nn.EmbeddingBag) -> None:
    """Raise unless the weight of a bag is a parameter."""
    if "weight" not in bag._parameters:
        raise ValueError(
            f"{where} has a weight that is computed from others (a parametrization, pruning or "
            "weight norm); make it permanent, or keep this bag in another list"
        )


def check_plain(where: str, bag: torch.nn.EmbeddingBag) -> None:
    """Raise if a call of a bag does more than that of a plain one."""
    cls = type(bag)
    for name in _METHODS:
        if name in vars(bag) or getattr(cls, name) is not getattr(torch.nn.EmbeddingBag, name):
            raise TypeError(
                f"{where} is of type {cls.__name__} with methods of its own, which the merged "
                "module would not call; use a plain torch.nn.EmbeddingBag, or keep this bag in "
                "another list"
            )
    hooks = [hook for kind in HOOKS for hook in getattr(bag, kind).values()]
    if not all(map(_is_refusal, hooks)):
        raise ValueError(
            f"{where} has hooks, which the merged module would not call; remove them, or keep this "
            "bag in another list"
        )


def check_trainable(where: str, weight: Tensor) -> None:
    """Raise if an optimizer must not train a table without making its gradient."""
    if not weight.requires_grad:
        raise ValueError(
            f"{where} is frozen (requires_grad=False), and the optimizer would train it; call "
            "requires_grad_() on it, merge without an optimizer, or keep this bag in another list"
        )
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise ValueError(
            f"{where} has hooks for its gradient, which is never made with an optimizer; remove "
            "them, merge without an optimizer, or keep this bag in another list"
        )


def check_apart(weights: Sequence[Tensor], where: Callable[[int], str]) -> None:
    """Raise if tables of one optimizer share memory; ``where`` names a table, by its number."""
    orders = update_order(weights)
    if any(orders) or len(set(weights)) < len(weights):
        t = next((t for t, order in enumerate(orders) if order), len(weights) - 1)
        raise ValueError(
            f"{where(t)} shares memory with an earlier one, and both would be updated at once; "
            "merge without an optimizer, or clone() it first"
        )


def refusal(name: str, call: str) -> Callable[[torch.nn.Module, object], None]:
    """A hook that makes a bag of a module refuse to be called for training.

    Args:
        name: what errors call the module.
        call: how errors say to call it.
    """
    return functools.partial(_refuse_training, name, call)


def _is_refusal(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func is _refuse_training


def _refuse_training(name: str, call: str, bag: torch.nn.Module, args: object) -> None:
    """Raise if a bag that only the merged module updates is called on its own for training."""
    if bag.training and torch.is_grad_enabled() and not bag.weight.requires_grad:
        raise RuntimeError(
            f"a bag of {name} was called by itself, and would learn nothing: its table is updated "
            f"by the backward pass of the merged module. Call that in the forward, as in {call}, "
            "or call the bag in eval mode or under torch.no_grad(). To train a copy of the bag by "
            "another optimizer, call requires_grad_() on it"
        )
