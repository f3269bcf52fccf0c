"""What modules share that compute differently from their own class in training only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transforms.rewrites.scripting import ScriptedAsOwn

_TENSORS = (Tensor, nn.Parameter)


class ForTraining(ScriptedAsOwn):
    """A module whose own class computes in eval mode; passes for inference take that back."""


def is_computed(module: nn.Module) -> bool:
    """Whether the class computes weight or bias at each read, as a parametrization makes it.

    Such a value must be read once: spectral_norm, for example, iterates in each read.
    """
    own = type(module)
    return hasattr(own, "weight") or hasattr(own, "bias")


def are_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether all are dense tensors of torch's own classes on the CPU."""
    for t in (x, weight) if bias is None else (x, weight, bias):
        if type(t) not in _TENSORS or t.layout is not torch.strided or not t.is_cpu:
            return False
    return True
