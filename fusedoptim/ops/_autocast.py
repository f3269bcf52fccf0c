"""What ``torch.autocast`` does to the arguments of operators of which torch does not know."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim.ops._launching import DEVICES


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Autocast's dtype for a device, or None where it is not active, as for meta tensors."""
    kind = device.type  # torch raises for kinds without autocast
    if kind not in DEVICES or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def autocast(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor as autocast passes it on: in ``dtype``, or in autocast's own if that is None.

    As in torch, float64 and integers stay.
    """
    own = autocast_dtype(tensor.device)
    if own is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(own if dtype is None else dtype)
