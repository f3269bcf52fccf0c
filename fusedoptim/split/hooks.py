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
from torch.nn.parallel import DistributedDataParallel

_KEY = "fusedoptim"
_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"
"""The module of torch's optimizers that backward steps, by hooks on these nodes too."""


def check_no_hooks(optimizer: str, params: Iterable[Tensor]) -> None:
    """Raise if ``params`` would lose hooks by a change of their dtype.

    Args:
        optimizer: its name in errors.
        params: the parameters that are to be split or merged.

    Raises:
        RuntimeError: a DistributedDataParallel, or an optimizer that backward steps, has a hook on
            the node in which the gradients of one are added up.
    """
    if not distributed.is_initialized() and _IN_BACKWARD not in sys.modules:
        return
    held = list(filter(_is_held, params))  # by hooks, or by the graph of a loss
    hooked = _hooked() if held else ()
    for p in held:
        if p in hooked:
            raise RuntimeError(
                f"{optimizer}: the dtype of a parameter of shape {tuple(p.shape)} cannot change, "
                "as it would lose the hooks by which DistributedDataParallel averages its "
                "gradients, or backward steps an optimizer. Split parameters, by making the "
                "optimizer or by transforms.optimize, before DistributedDataParallel(model); to "
                "merge them, delete the wrapper first"
            )


def data_parallels() -> list[DistributedDataParallel]:
    """All DistributedDataParallels of the process."""
    gc.collect()  # one that was deleted is part of a cycle
    return [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]


def _hooked() -> set[Tensor]:
    """The parameters of all DistributedDataParallels, and of optimizers that backward steps."""
    hooked = {p for wrapper in data_parallels() for p in wrapper.module.parameters()}
    in_backward = sys.modules.get(_IN_BACKWARD)
    if in_backward is not None:
        hooked.update(in_backward.param_to_acc_grad_map)
    return hooked


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
