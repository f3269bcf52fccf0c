"""Disguises for the layers of a copied model: what forward then does otherwise depends on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from transforms.rewrites.exchanged_class import become


class Disguise(NamedTuple):
    """How a copied layer differs from the model's in a trace, as a rewritten layer may."""

    is_unrelated: bool
    """Whether its class does not derive from its own, and it has no tensors."""
    gets_bias: bool
    """Whether it has a bias even if its own is None, as where a BatchNorm is folded into it."""

    def put_on(self, layer: nn.Module) -> None:
        """Change a copied layer."""
        own = type(layer)
        if self.is_unrelated:
            become(layer, Stranger)
            layer._parameters.clear()
            layer._buffers.clear()
            return
        become(layer, type("Derived", (own,), {"__module__": own.__module__}))
        if self.gets_bias and "bias" in layer._parameters and layer._parameters["bias"] is None:
            layer._parameters["bias"] = nn.Parameter(torch.empty(0))


class Stranger(nn.Identity):
    """The class of an unrelated layer: an Identity, as a folded BatchNorm is."""
