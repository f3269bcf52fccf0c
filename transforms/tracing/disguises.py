"""Disguises for the layers of a copied model: what it then does differently depends on them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import nn

from transforms.rewrites.exchanged_class import become

_LIBRARIES = ("torch.nn.", "fusedoptim.nn.", "transformers.")
_MARK = "_fusedoptim_disguised"
"""An attribute, as a rewritten layer has some of its own."""


class Disguise(NamedTuple):
    """How a copied layer differs from the model's in a trace, as a rewritten layer may."""

    is_unrelated: bool
    """Whether its class does not derive from its own, and it has no tensors."""
    gets_bias: bool
    """Whether it has a bias even if its own is None, as where a BatchNorm is folded into it."""

    def put_on(self, layer: nn.Module) -> None:
        """Change a copied layer."""
        own = type(layer)
        vars(layer)[_MARK] = None
        if self.is_unrelated:
            become(layer, Stranger)
            layer._parameters.clear()
            layer._buffers.clear()
            return
        if own.__module__.startswith(_LIBRARIES):  # no pass gives a user's class another one
            become(layer, _derived(own))  # type: ignore[arg-type]  # Module's __hash__ has no type
        if self.gets_bias and "bias" in layer._parameters and layer._parameters["bias"] is None:
            layer._parameters["bias"] = nn.Parameter(torch.empty(0))


@functools.lru_cache(maxsize=128)
def _derived(own: type[nn.Module]) -> type[nn.Module]:
    return type("Derived", (own,), {})


class Stranger(nn.Identity):
    """The class of an unrelated layer: an Identity, as a folded BatchNorm is."""
