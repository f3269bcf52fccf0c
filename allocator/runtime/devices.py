"""The list of SYCL devices, printed as a table."""

from __future__ import annotations

from typing import Any, NamedTuple

from allocator.runtime.fork import check_not_forked, note_driver_runs
from allocator.runtime.formatting import as_html, as_text, size_text
from allocator.runtime.libraries import cpu_driver_registered, load_dpctl

KINDS = ("device", "shared", "host")
"""The kinds of USM memory."""
_HEADER = ("device", "name", "driver", "memory", "kinds", "units", "float64", "float16")


class Device(NamedTuple):
    """A device as its driver describes it."""

    filter_string: str
    """argument for :func:`queue` and :class:`Pool`, such as "opencl:cpu:0"."""
    name: str
    """name of the hardware."""
    driver: str
    """version of the driver."""
    memory: int
    """bytes of memory; a CPU's is the machine's."""
    kinds: tuple[str, ...]
    """kinds of USM memory that a :class:`Pool` can use."""
    units: int
    """number of compute units; of a CPU its hardware threads."""
    has_float64: bool
    """whether kernels can compute in float64."""
    has_float16: bool
    """whether kernels can compute in float16; ours compute in float32 and do not need it."""


class Devices(tuple[Device, ...]):
    """Devices in the order of their drivers.

    Made by :func:`devices`. It prints as a table, in a terminal and in a notebook.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return as_text(_HEADER, map(_cells, self), str.ljust) if self else _NONE

    def _repr_html_(self) -> str:
        return as_html(_HEADER, map(_cells, self)) if self else f"<p>{_NONE}</p>"


_NONE = "no SYCL device: no driver was found"


def devices() -> Devices:
    """The SYCL devices that drivers offer to this process.

    Returns:
        a tuple, which a notebook shows as a table.

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
    return Device(
        device.filter_string,
        device.name.strip(),
        device.driver_version,
        device.global_mem_size,
        tuple(kind for kind in KINDS if getattr(device, f"has_aspect_usm_{kind}_allocations")),
        device.max_compute_units,
        device.has_aspect_fp64,
        device.has_aspect_fp16,
    )


def _cells(device: Device) -> tuple[str, ...]:
    """A row of the table."""
    *names, memory, kinds, units, has_float64, has_float16 = device
    has = ("yes" if each else "no" for each in (has_float64, has_float16))
    return (*names, size_text(memory), ", ".join(kinds) or "none", str(units), *has)
