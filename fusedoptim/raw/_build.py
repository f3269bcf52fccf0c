"""A SPIR-V module built by a device's driver, or what the driver has against it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

from fusedoptim import _program
from fusedoptim.raw._errors import InvalidModuleError, KernelCompileError
from fusedoptim.raw._spirv import ModuleFacts

# SPIR-V's capabilities that devices lack: the aspect of SYCL that has them, and the way out.
_ASPECTS = {
    9: ("fp16", "float16 arithmetic", "compute in float, with vload_half and vstore_half"),
    10: ("fp64", "float64 arithmetic", "compute in float"),
    12: ("atomic64", "64-bit atomics", "use 32-bit ones"),
}


def check_capabilities(facts: ModuleFacts, device: Any) -> None:
    """Raise InvalidModuleError if the module needs what the device has not."""
    for number in sorted(facts.capabilities & _ASPECTS.keys()):
        aspect, what, cure = _ASPECTS[number]
        if not getattr(device, f"has_aspect_{aspect}"):
            raise InvalidModuleError(f"the module needs {what}, which {device.name} lacks; {cure}")


def build(queue: Any, spirv: bytes, facts: ModuleFacts, options: Sequence[str]) -> Any:
    """Dpctl's program of a module for the device of ``queue``.

    This is where the driver compiles: the CPU's takes some 40 ms for a small kernel.

    Raises:
        InvalidModuleError: the module needs what the device lacks.
        KernelCompileError: the driver refuses it; the message has the driver's log.
    """
    check_capabilities(facts, queue.sycl_device)
    try:
        return _program.build(queue, spirv, " ".join(options))
    except _program.BuildError as error:
        log = _driver_log(queue.sycl_device, spirv, options)
        raise KernelCompileError(
            f"the driver of {queue.sycl_device.name} does not build the module:\n{log or error}",
            log,
        ) from error


_PLATFORM_NAME, _DEVICE_NAME, _BUILD_LOG, _ALL_DEVICES = 0x0902, 0x102B, 0x1183, 0xFFFFFFFF


def _driver_log(device: Any, spirv: bytes, options: Sequence[str]) -> str:
    """What the driver says as it builds the module once more; dpctl keeps it to itself.

    "" where the device is not OpenCL's or it says nothing.
    """
    if device.backend.name != "opencl":
        return ""
    try:
        opencl = ctypes.CDLL("libOpenCL.so.1", mode=os.RTLD_NOLOAD)  # the one that SYCL loaded
    except OSError:
        return ""
    for name in ("clCreateContext", "clCreateProgramWithIL"):
        getattr(opencl, name).restype = ctypes.c_void_p
    handle = _opencl_device(opencl, device)
    if handle is None:
        return ""
    status = ctypes.c_int()
    context = ctypes.c_void_p(
        opencl.clCreateContext(None, 1, ctypes.byref(handle), None, None, ctypes.byref(status))
    )
    program = ctypes.c_void_p(
        opencl.clCreateProgramWithIL(
            context, spirv, ctypes.c_size_t(len(spirv)), ctypes.byref(status)
        )
    )
    text = ""
    if program:
        flags = " ".join(options).encode()
        opencl.clBuildProgram(program, 1, ctypes.byref(handle), flags, None, None)
        text = _text(opencl.clGetProgramBuildInfo, program, handle, ctypes.c_uint(_BUILD_LOG))
        opencl.clReleaseProgram(program)
    if context:
        opencl.clReleaseContext(context)
    return text


def _opencl_device(opencl: ctypes.CDLL, device: Any) -> ctypes.c_void_p | None:
    """The OpenCL device of the same platform and name."""
    platforms = _handles(opencl.clGetPlatformIDs)
    for platform in platforms:
        if _text(opencl.clGetPlatformInfo, platform, ctypes.c_uint(_PLATFORM_NAME)) != (
            device.sycl_platform.name
        ):
            continue
        for handle in _handles(opencl.clGetDeviceIDs, platform, ctypes.c_ulong(_ALL_DEVICES)):
            if _text(opencl.clGetDeviceInfo, handle, ctypes.c_uint(_DEVICE_NAME)) == device.name:
                return handle
    return None


def _handles(function: Callable[..., int], *arguments: Any) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if function(*arguments, 0, None, ctypes.byref(count)):
        return []
    handles = (ctypes.c_void_p * count.value)()
    function(*arguments, count, handles, None)
    return [ctypes.c_void_p(handle) for handle in handles]


def _text(function: Callable[..., int], *arguments: Any) -> str:
    size = ctypes.c_size_t()
    function(*arguments, ctypes.c_size_t(0), None, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value + 1)
    function(*arguments, size, buffer, None)
    return buffer.value.decode(errors="replace").strip()
