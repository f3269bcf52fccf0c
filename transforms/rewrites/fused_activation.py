"""Activations that the product before them applies, or that write into its output.

If the activation is the only user of a packed module's output, the module marks that output: as
activated already, or as free to be written to. An activation that gets no mark computes as its own
class does. So a module that computes with its plain weight, for whatever reason, needs to know
nothing about the activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from transforms.rewrites import exchanged_class
from transforms.rewrites.post_ops import post_op
from transforms.rewrites.scripting import ScriptedAsOwn
from transforms.rewrites.undoing import Undo
from transforms.tracing.asked import Asked
from transforms.tracing.modules import GLOBAL_HOOKS, has_hooks, has_replaced_methods

_MARK = "_fusedoptim_output"
_ACTIVATED, _FREE = "activated", "free"


class FusedActivation(ScriptedAsOwn):
    """An activation that returns its input if the product before it has applied it already."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        """Return the activated input."""
        mark = getattr(input, _MARK, None) if type(input) is Tensor else None
        if mark is not None and torch.compiler.is_compiling():
            setattr(input, _MARK, None)  # torch.compile cannot trace delattr
            if mark == _ACTIVATED:  # by a product that ran eagerly, before a graph break
                return input
        elif mark is not None:
            delattr(input, _MARK)
            post = post_op(self) if mark == _FREE else None
            return input if post is None else post.in_place(input)
        result: Tensor = exchanged_class.own_class(self).forward(self, input)
        return result

    def _get_name(self) -> str:
        return f"Fused{exchanged_class.own_class(self).__name__}"

    def extra_repr(self) -> str:
        """Return what the activation's own class does."""
        return exchanged_class.own_class(self).extra_repr(self)


def objection(activation: nn.Module, asked: Asked) -> str | None:
    """Why an activation that :func:`post_op` knows must keep its class, if it must."""
    if has_replaced_methods(activation):
        return f"overrides its methods: {type(activation).__name__} may differ"
    return asked.objection(activation)


def make_fused(activation: nn.Module, undo: Undo) -> None:
    """Make an activation look at the marks of the products before it."""
    if not isinstance(activation, FusedActivation):  # it may follow several products
        exchanged_class.exchange(activation, FusedActivation, undo)


def may_apply(product: nn.Module, activation: nn.Module) -> bool:
    """Whether the activation looks at the marks of ``product``, and no hooks see its input."""
    return isinstance(activation, FusedActivation) and not are_observed(product, activation)


def are_observed(product: nn.Module, follower: nn.Module) -> bool:
    """Whether hooks see what one of the modules hands to the other."""
    return any(GLOBAL_HOOKS) or has_hooks(product) or has_hooks(follower)


def mark_activated(product: Any) -> None:
    """Tell the activation that it has been applied to ``product``."""
    setattr(product, _MARK, _ACTIVATED)


def mark_free(product: Any) -> None:
    """Tell the activation that it may write into ``product``."""
    setattr(product, _MARK, _FREE)
