"""The kinds of devices that kernels run on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedoptim.launch.backend import Backend
from fusedoptim.launch.cpu import CPU
from fusedoptim.launch.xpu import XPU

if TYPE_CHECKING:
    import torch

_BACKENDS: tuple[Backend, ...] = (CPU(), XPU())

BACKENDS = {backend.torch_type: backend for backend in _BACKENDS}
"""By the type of a torch device."""


def backend_of(queue: Any) -> Backend:
    """What drives the device of a ``dpctl.SyclQueue``."""
    return next(backend for backend in _BACKENDS if backend.drives(queue.sycl_device))


def queue_of(device: torch.device) -> Any:
    """The ``dpctl.SyclQueue`` on which tensors of ``device`` are updated now."""
    return BACKENDS[device.type].queue(device)
