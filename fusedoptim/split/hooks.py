"""Hooks of autograd that a parameter would lose by changing its dtype.

Autograd adds a parameter's gradients up in a node, which has the parameter's dtype and is replaced
when that changes. DistributedDataParallel averages gradients by hooks of these nodes: after a
change it would call none of them, and say nothing.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.graph import get_gradient_edge

_KEY = "fusedoptim"
_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
"""The module of torch's optimizers that backward steps, by hooks on these nodes too."""


def check_no_hooks(optimizer: str, params: Iterable[Tensor]) -> None:
    """Raise if ``params`` would lose hooks by a change of their dtype.

    Args:
        optimizer: its name in errors.
        params: the parameters that are to be split or merged.

    Raises:
        RuntimeError: something holds the node in which the gradients of one are added up.
    """
    if not distributed.is_initialized() and _IN_BACKWARD not in sys.modules:
        return  # then only the graph of a loss holds it
    held = list(filter(_is_held, params))
    if held:
        gc.collect()  # a DistributedDataParallel that was deleted is part of a cycle
    for p in filter(_is_held, held):
        raise RuntimeError(
            f"{optimizer}: the dtype of a parameter of shape {tuple(p.shape)} cannot change, as "
            "it would lose the hooks by which DistributedDataParallel averages its gradients. "
            "Split parameters, by making the optimizer or by transforms.optimize, before "
            "DistributedDataParallel(model); to merge them, delete the wrapper first. Delete "
            "losses too: their graphs refer to the parameters in the same way"
        )


def _is_held(param: Tensor) -> bool:
    """Whether anything holds the node in which the gradients of ``param`` are added up."""
    if not param.requires_grad or not param.is_leaf:
        return False
    with torch.inference_mode(False), torch.enable_grad():
        metadata: Any = get_gradient_edge(param).node.metadata
        metadata[_KEY] = True
        # Nothing else holds the node of a parameter: the next call makes another one.
        metadata = get_gradient_edge(param).node.metadata
        return bool(metadata.pop(_KEY, False))
