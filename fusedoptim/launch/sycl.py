"""SPIR-V compiled by a device's driver, through dpctl's C library.

``dpctl.program.create_program_from_spirv`` does the same and keeps all other threads waiting: 60 ms
for a kernel, 300 ms for a process's first.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

from fusedoptim.allocator import load_dpctl
from fusedoptim.launch.backend import Launcher
from fusedoptim.launch.modules import Module


class BuildError(Exception):
    """The driver does not compile a module; ``log`` is what it said, "" where that is not known."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@functools.cache
def dpctl_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of the C library that dpctl is made of, or None where this dpctl has none such.

    Args:
        name: of the function.
        result: ctypes' type of what it returns.
        arguments: ctypes' types of what it takes.
    """
    folder = os.path.dirname(str(load_dpctl().__file__))
    library = ctypes.CDLL(os.path.join(folder, "libDPCTLSyclInterface.so"))
    found = getattr(library, name, None)
    if found is not None:
        found.restype, found.argtypes = result, arguments
    return found


def build(queue: Any, spirv: bytes, options: str = "") -> Any:
    """Compile a module for the device of ``queue``.

    Args:
        queue: a dpctl.SyclQueue.
        spirv: the module.
        options: for the driver's compiler.

    Returns:
        a dpctl.program.SyclProgram.

    Raises:
        BuildError: the driver refuses the module.
    """
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    takes = pointer, pointer, text, ctypes.c_size_t, text
    create = dpctl_function("DPCTLKernelBundle_CreateFromSpirv", pointer, *takes)
    delete = dpctl_function("DPCTLKernelBundle_Delete", None, pointer)
    context, device = queue.sycl_context, queue.sycl_device
    bundle = create(
        context.addressof_ref(), device.addressof_ref(), spirv, len(spirv), options.encode()
    )
    if bundle is None:
        raise BuildError("the driver does not say why")
    try:
        return _program_maker()(bundle)
    finally:
        delete(bundle)


@functools.cache
def _program_maker() -> Callable[[int], Any]:
    """``SyclProgram_Make`` of dpctl's C API for Python: it copies the handle that it is given."""
    capsule = load_dpctl().program._program.__pyx_capi__["SyclProgram_Make"]
    python = ctypes.pythonapi
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", python))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", python)
    )
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)
    return make(address_of(capsule, name_of(capsule)))


class SyclLauncher:
    """Submits a kernel to a SYCL queue."""

    def __init__(self, queue: Any, handle: Any, lanes: int) -> None:
        """Prepare submissions.

        Args:
            queue: a dpctl.SyclQueue.
            handle: a dpctl.program.SyclKernel.
            lanes: work items in a group.
        """
        self._submit = queue.submit_async
        self._handle = handle
        self._local_size = [lanes]

    def submit(self, address: int, items: int, elements: int, events: list[Any]) -> bool:
        """See :meth:`Launcher.submit`."""
        argument = ctypes.c_int64(address)
        sizes = ([items],), (self._local_size,)
        events.extend(map(self._submit, (self._handle,), ([argument],), *sizes))
        return True

    def wait(self, event: Any) -> None:
        """Return when the kernel of this event has ended."""
        event.wait()


def build_launcher(queue: Any, module: Module, lanes: int) -> Callable[[], Launcher]:
    """Have the driver of ``queue`` compile a shipped kernel; returns what makes its launchers.

    Args:
        queue: a dpctl.SyclQueue.
        module: the kernel.
        lanes: work items in a group.

    Raises:
        BuildError: the driver refuses the module.
    """
    handle = build(queue, module.spirv).get_sycl_kernel(module.name)
    return functools.partial(SyclLauncher, queue, handle, lanes)
