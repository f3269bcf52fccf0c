"""The kinds of devices that kernels run on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusedoptim.allocator import DeviceNotFoundError, queue
from fusedoptim.launch.backend import Backend
from fusedoptim.launch.cpu import CPU
from fusedoptim.launch.xpu import XPU

if TYPE_CHECKING:
    import torch

_BACKENDS: tuple[Backend, ...] = (CPU(), XPU())

BACKENDS = {backend.torch_type: backend for backend in _BACKENDS}
"""The backend for each type of torch device."""


def backend_of(queue: Any) -> Backend:
    """The backend of the device of a ``dpctl.SyclQueue``."""
    device = queue.sycl_device
    for backend in _BACKENDS:
        if backend.drives(device):
            return backend
    raise RuntimeError(
        f"{device.name} is of no kind that kernels run on ({', '.join(BACKENDS)}); name another "
        "device, such as device='cpu'"
    )


def is_on_host(device: torch.device) -> bool:
    """Whether kernels run on the device, and use the host's memory."""
    backend = BACKENDS.get(device.type)
    return backend is not None and backend.runs_on_host


def queue_of(device: torch.device) -> Any:
    """The ``dpctl.SyclQueue`` on which tensors of ``device`` are updated now."""
    return BACKENDS[device.type].queue(device)


def named_queue(device: Any) -> Any:
    """The ``dpctl.SyclQueue`` that a ``device`` argument of the user's names.

    Args:
        device: a SYCL filter string such as "cpu" or "level_zero:gpu:1"; the name of a torch device
            that is not the host's, such as "xpu"; a ``torch.device``; or a queue.

    Raises:
        DeviceNotFoundError: there is no such device.
    """
    if not isinstance(device, str):
        return queue(device)
    backend = BACKENDS.get(device.partition(":")[0])
    if backend is None or backend.runs_on_host:
        return queue(device)
    import torch

    place, found = torch.device(device), backend.devices()
    if not found or (place.index is not None and place not in found):
        listed = ", ".join(map(str, found)) or "none"
        raise DeviceNotFoundError(
            f"device={device!r} is not among torch's devices of this type ({listed}); "
            f"install torch with support for {place.type}, or name another device, such as 'cpu'"
        )
    return backend.queue(place)
