"""The kinds of devices that SYCL drives."""

from __future__ import annotations

from typing import Any, NamedTuple


class DeviceKind(NamedTuple):
    """What differs between devices of one kind and those of another."""

    name: str
    """SYCL's, in filter strings."""
    torch_type: str
    """The ``torch.device.type`` of its devices."""
    is_host: bool
    """Whether its memory is the host's, which Python can read and write."""
    install: str
    """How to install a driver."""


DEVICE_KINDS = (
    DeviceKind("cpu", "cpu", True, "pip install intel-opencl-rt"),
    DeviceKind(
        "gpu",
        "xpu",
        False,
        "install Intel's GPU driver (on Debian and Ubuntu: "
        "apt install intel-opencl-icd libze1 libze-intel-gpu1)",
    ),
)


def is_host(sycl_device: Any) -> bool:
    """Whether the memory of a ``dpctl.SyclDevice`` is the host's."""
    return any(kind.is_host and getattr(sycl_device, f"is_{kind.name}") for kind in DEVICE_KINDS)
