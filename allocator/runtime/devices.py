"""The devices that the drivers offer, for people to look at."""

from __future__ import annotations

from typing import Any, NamedTuple

from allocator.pool.sizes import size_text
from allocator.runtime.fork import check_not_forked, note_driver_runs
from allocator.runtime.libraries import cpu_driver_registered, load_dpctl
from allocator.watching.tables import as_html, as_text

_KINDS = ("device", "shared", "host")
_HEADER = ("device", "name", "driver", "memory", "kinds", "units", "float64", "float16")


class Device(NamedTuple):
    """What a driver says of one of its devices."""

    filter_string: str
    """what :func:`queue` and :class:`Pool` take, such as "opencl:cpu:0"."""
    name: str
    """of the hardware."""
    driver: str
    """its version."""
    memory: int
    """bytes; a CPU's is the machine's own."""
    kinds: tuple[str, ...]
    """of USM memory, of which a :class:`Pool` can be made."""
    units: int
    """that run work-groups side by side: of a CPU its hardware threads."""
    has_float64: bool
    """whether kernels can compute in float64."""
    has_float16: bool
    """and in float16 (ours compute in float32 and need it for nothing)."""


class Devices(tuple[Device, ...]):
    """Devices, in the order in which the drivers name them.

    Made by :func:`devices`. It prints as a table, in a terminal and in a notebook.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return as_text(_HEADER, map(_cells, self), str.ljust) if self else _NONE

    def _repr_html_(self) -> str:
        return as_html(_HEADER, map(_cells, self)) if self else f"<p>{_NONE}</p>"


_NONE = "no SYCL device: no driver was found"


def devices() -> Devices:
    """The SYCL devices of this machine that the drivers show to this process.

    Returns:
        a tuple, empty if there is none, that a notebook shows as a table.

    Raises:
        ImportError: dpctl or the SYCL runtime is not installed.
        RuntimeError: this process was forked from one that already used a device.

    Example:
        >>> import allocator
        >>> cpu = next(d for d in allocator.devices() if "cpu" in d.filter_string)
        >>> cpu.kinds
        ('device', 'shared', 'host')
        >>> pool = allocator.Pool(cpu.filter_string)
    """
    check_not_forked()
    with cpu_driver_registered():
        found = load_dpctl().get_devices()
    note_driver_runs()
    return Devices(map(_described, found))


def _described(device: Any) -> Device:
    """What dpctl's object says."""
    return Device(
        device.filter_string,
        device.name.strip(),
        device.driver_version,
        device.global_mem_size,
        tuple(kind for kind in _KINDS if getattr(device, f"has_aspect_usm_{kind}_allocations")),
        device.max_compute_units,
        device.has_aspect_fp64,
        device.has_aspect_fp16,
    )


def _cells(device: Device) -> tuple[str, ...]:
    """A row of the table."""
    return (
        device.filter_string,
        device.name,
        device.driver,
        size_text(device.memory),
        ", ".join(device.kinds) or "none",
        str(device.units),
        "yes" if device.has_float64 else "no",
        "yes" if device.has_float16 else "no",
    )
