"""Devices as DLPack numbers them and torch names them."""

from __future__ import annotations

from typing import Any

from allocator.runtime.kinds import is_host
from allocator.runtime.libraries import load_dpctl

KDL_CPU, KDL_ONEAPI = 1, 14
HOST = (KDL_CPU, 0)
_TORCH_TYPES = {KDL_CPU: "cpu", KDL_ONEAPI: "xpu"}
"""The ``torch.device.type`` of devices whose memory pools hold and :func:`from_dlpack` takes."""
TAKEN = _TORCH_TYPES.keys()


def oneapi_device(sycl_device: Any) -> tuple[int, int]:
    """DLPack's type and id of a SYCL device; a sub-device has those of its parent."""
    while sycl_device.parent_device is not None:
        sycl_device = sycl_device.parent_device
    return KDL_ONEAPI, int(load_dpctl().get_devices().index(sycl_device))


def is_host_accessible(device: tuple[int, int]) -> bool:
    """Whether Python may read the memory: the host's, or that of a CPU as a SYCL device."""
    kind, number = device
    if kind == KDL_ONEAPI:
        return any(map(is_host, load_dpctl().get_devices()[number:][:1]))
    return kind == KDL_CPU


def torch_name(device: tuple[int, int]) -> str:
    """The name for ``torch.device``."""
    kind, number = device
    return f"{_TORCH_TYPES[kind]}:{number}"


def check_torch_has(device: tuple[int, int], torch: Any, pool: str) -> None:
    """Raise RuntimeError if ``torch``, the module, has no tensors on the device of ``pool``."""
    if device[0] == KDL_ONEAPI and not torch.xpu._is_compiled():
        raise RuntimeError(
            f"torch was built without XPU, so it has no tensors on {pool}; install torch's XPU "
            "build, or use array() with dpnp"
        )
