"""One SYCL queue for each device, made on demand and kept."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from allocator.runtime.fork import check_not_forked, note_driver_runs, renew_lock_in_child
from allocator.runtime.isa import DRIVER_VARIABLE, VARIABLE, check_isa
from allocator.runtime.kinds import DEVICE_KINDS
from allocator.runtime.libraries import (
    cpu_driver,
    cpu_driver_is_loaded,
    cpu_driver_registered,
    load_dpctl,
)
from allocator.runtime.maps import loaded_files

_lock = threading.RLock()  # a finalizer or signal handler may ask in the middle of a call
renew_lock_in_child(globals())
_queues: dict[str, Any] = {}
"""the queue of each filter string that was asked for; strings for one device share its queue."""
_borrowed: dict[int, Any] = {}

# Environment variables that select drivers and devices.
_LIMITS = (
    "ONEAPI_DEVICE_SELECTOR",
    "OCL_ICD_FILENAMES",
    "SYCL_DEVICE_ALLOWLIST",
    "UR_ADAPTERS_FORCE_LOAD",
)


class DeviceNotFoundError(RuntimeError):
    """No SYCL driver serves the requested device."""


def queue(device: Any = "cpu") -> Any:
    """The in-order SYCL queue of a device, the same object at every call.

    Args:
        device: a SYCL filter string such as "cpu", "gpu" or "level_zero:gpu:1". If several drivers
            serve the "cpu", Intel's is used. All names of one device have the same queue. A
            ``torch.device`` of the CPU is "cpu"; that of an XPU has the queue of torch's current
            stream. A ``dpctl.SyclQueue`` is returned as it is.

    Returns:
        a ``dpctl.SyclQueue``.

    Raises:
        TypeError: ``device`` is of another type.
        DeviceNotFoundError: no driver serves the device; the message says what to install.
        RuntimeError: this process was forked from one that already used a device, or
            FUSEDOPTIM_ISA was set after the CPU driver had started.
        ValueError: FUSEDOPTIM_ISA names a level that this machine lacks; or SYCL serves no
            ``torch.device`` of this type.

    Example:
        >>> queue("cpu") is queue("cpu")
        True
    """
    if not isinstance(device, str):
        return device if _is_queue(device) else _queue_of_torch(device)
    check_not_forked()
    with _lock:
        if device not in _queues:
            _queues[device] = _queue_of(device)
            note_driver_runs()
        found = _queues[device]
    check_isa(found.sycl_device)
    return found


def borrowed_queue(address: int) -> Any:
    """A ``dpctl.SyclQueue`` for a queue that another library owns.

    Args:
        address: address of its ``sycl::queue``, as in ``torch.xpu.current_stream().sycl_queue``.

    Returns:
        a ``dpctl.SyclQueue`` that submits to the same queue; the same object for the same address.

    Raises:
        RuntimeError: the process has loaded SYCL runtimes of two major versions, which cannot share
            queues; or it was forked from one that already used a device.

    Example:
        >>> own = queue("cpu")
        >>> borrowed_queue(own.addressof_ref()).sycl_device == own.sycl_device
        True
    """
    check_not_forked()
    with _lock:
        if address not in _borrowed:
            dpctl = load_dpctl()
            _check_one_sycl_runtime()
            new_capsule = ctypes.pythonapi.PyCapsule_New
            new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
            new_capsule.restype = ctypes.py_object
            # dpctl copies the queue, then renames the capsule; the name must outlive both.
            note_driver_runs()
            _borrowed[address] = dpctl.SyclQueue(new_capsule(address, b"SyclQueueRef", None))
        return _borrowed[address]


def check_queue(queue: Any) -> None:
    """Raise TypeError unless the argument ``queue`` is a ``dpctl.SyclQueue``."""
    if not _is_queue(queue):
        raise TypeError(f"queue={queue!r} is not a dpctl.SyclQueue; use allocator.queue()")


def _is_queue(value: Any) -> bool:
    return hasattr(value, "submit_barrier")


def _queue_of_torch(device: Any) -> Any:
    """The queue of a ``torch.device``."""
    torch = sys.modules.get("torch")  # which whoever has a torch.device has imported
    if torch is None or not isinstance(device, torch.device):
        raise TypeError(
            f"device={device!r} is not a device; pass a SYCL filter string such as 'cpu' or 'gpu', "
            "a torch.device or a dpctl.SyclQueue"
        )
    kind = next((kind for kind in DEVICE_KINDS if kind.torch_type == device.type), None)
    if kind is None:
        known = " or ".join(kind.torch_type for kind in DEVICE_KINDS)
        raise ValueError(f"device={device!r} is not served by SYCL; pass one of type {known}")
    if kind.is_host:
        return queue(kind.name)
    module = torch.get_device_module(device)
    count = module.device_count()
    if (device.index or 0) >= count:
        raise DeviceNotFoundError(
            f"device={device!r} is not among torch's {device.type.upper()}s ({count} found); "
            f"install torch with support for {device.type.upper()}, or pass a SYCL filter string "
            f"such as {kind.name!r}"
        )
    return borrowed_queue(module.current_stream(device).sycl_queue)


def _queue_of(device: str) -> Any:
    """The queue of the device that a filter string names: that of its other names, or a new one."""
    dpctl = load_dpctl()
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    with cpu_driver_registered():
        try:
            found = _found(device)
        except (ValueError, dpctl.SyclDeviceCreationError) as error:
            present = ", ".join(d.filter_string for d in dpctl.get_devices()) or "none"
            raise DeviceNotFoundError(
                f"no SYCL driver serves the device {device!r} (devices found: {present}); "
                f"{_cure(device, present, limits)}"
            ) from error
        for known in _queues.values():
            if known.sycl_device == found:
                return known
        try:
            return dpctl.SyclQueue(found, property="in_order")
        except dpctl.SyclQueueCreationError as error:
            target = os.environ.get(DRIVER_VARIABLE)
            if target is None or not found.is_cpu:
                raise
            raise DeviceNotFoundError(
                f"the CPU driver refuses to start with {DRIVER_VARIABLE}={target!r}; unset it, or "
                f"use {VARIABLE}, which names the levels that it has"
            ) from error


def _cure(device: str, present: str, limits: list[str]) -> str:
    """The advice for a device that was not found.

    Args:
        device: its filter string.
        present: filter strings of those that were found.
        limits: variables that may hide it.
    """
    kind = next((kind for kind in DEVICE_KINDS if kind.name in device.split(":")), None)
    if kind is None:
        names = ", ".join(repr(kind.name) for kind in DEVICE_KINDS)
        hint = f"use {names} or one of those found"
    elif kind.name in present:
        hint = "use one of those found"
    else:
        hint = kind.install
    if limits:
        return f"unset {' and '.join(limits)}, which may hide it, or {hint}"
    driver = cpu_driver()
    if device == "cpu" and driver is not None and not cpu_driver_is_loaded():
        try:
            ctypes.CDLL(str(driver))
        except OSError as error:  # as where a limit leaves no address space
            return f"intel-opencl-rt is installed, but cannot be loaded: {error}; restart Python"
        return (
            "intel-opencl-rt is installed, but OpenCL looked for drivers before this "
            "package could name it; restart Python, and call allocator.queue() before dpctl is "
            "asked for devices"
        )
    return hint


def _found(device: str) -> Any:
    """The device of a filter string; if several drivers serve the CPU, Intel's.

    SYCL may rank another OpenCL driver of the system higher, such as PoCL, which cannot build the
    kernels.
    """
    dpctl = load_dpctl()
    found = dpctl.SyclDevice(device)
    if device == "cpu":
        drivers = dpctl.get_devices(device_type="cpu")
        intels = [other for other in drivers if "Intel" in other.sycl_platform.name]
        return next(iter(intels), found)
    return found


def _check_one_sycl_runtime() -> None:
    names = map(os.path.basename, loaded_files())
    majors = sorted({name.split(".")[2] for name in names if name.startswith("libsycl.so.")})
    if len(majors) > 1:
        raise RuntimeError(
            "torch and dpctl loaded SYCL runtimes of different major versions "
            f"({', '.join(majors)}), which cannot share a queue; "
            "install the dpctl whose intel-sycl-rt is the one that torch requires (pip show torch)"
        )
