"""A SPIR-V module built by a device's driver, or what the driver has against it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fusedoptim.launch import sycl
from fusedoptim.launch.opencl import Driver, Owned, driver_of
from fusedoptim.launch.sycl import BuildError
from fusedoptim.raw._errors import InvalidModuleError, KernelCompileError
from fusedoptim.raw._spirv import ModuleFacts, read_module

# SPIR-V's capabilities that devices lack: the aspect of SYCL that has them, and the way out.
_ASPECTS = {
    9: ("fp16", "float16 arithmetic", "compute in float, with vload_half and vstore_half"),
    10: ("fp64", "float64 arithmetic", "compute in float"),
    12: ("atomic64", "64-bit atomics", "use 32-bit ones"),
}


class Program:
    """A SPIR-V module, and what was built from it."""

    def __init__(self, spirv: bytes, options: Sequence[str]) -> None:
        """Read the module.

        Args:
            spirv: the module.
            options: for the drivers' compilers.
        """
        self.spirv = spirv
        self.facts: ModuleFacts = read_module(spirv)
        self._options = " ".join(options)
        self._built: dict[Any, Any] = {}
        self._lock = threading.RLock()  # a signal handler may launch a kernel in the middle

    def by_sycl(self, queue: Any) -> Any:
        """Dpctl's program for the device of ``queue``, built at the first call.

        This is where the driver compiles: the CPU's takes some 40 ms for a small kernel.

        Raises:
            InvalidModuleError: the module needs what the device lacks.
            KernelCompileError: the driver refuses it; the message has the driver's log.
        """
        device = queue.sycl_device

        def build() -> Any:
            try:
                return sycl.build(queue, self.spirv, self._options)
            except BuildError as error:
                raise _refusal(device, self._log(device)) from error

        return self._once((queue.sycl_context, device), device, build)

    def by_opencl(self, driver: Driver, device: Any) -> Owned:
        """OpenCL's program for the same device, from the disk if it was compiled before.

        Raises:
            InvalidModuleError: the module needs what the device lacks.
            KernelCompileError: the driver refuses it; the message has the driver's log.
        """

        def build() -> Owned:
            try:
                return driver.program(self.spirv, self._options)
            except BuildError as error:
                raise _refusal(device, error.log) from error

        program: Owned = self._once(driver, device, build)
        return program

    def _once(self, key: Any, device: Any, build: Callable[[], Any]) -> Any:
        with self._lock:
            if key not in self._built:
                check_capabilities(self.facts, device)
                self._built[key] = build()
            return self._built[key]

    def _log(self, device: Any) -> str:
        """What the driver says as it builds the module once more; dpctl keeps it to itself.

        "" where the device is not OpenCL's or it says nothing.
        """
        driver = driver_of(device)
        try:
            if driver is not None:
                driver.compiled(self.spirv, self._options)
        except BuildError as error:
            return error.log
        return ""


def check_capabilities(facts: ModuleFacts, device: Any) -> None:
    """Raise InvalidModuleError if the module needs what the device has not."""
    for number in sorted(facts.capabilities & _ASPECTS.keys()):
        aspect, what, cure = _ASPECTS[number]
        if not getattr(device, f"has_aspect_{aspect}"):
            raise InvalidModuleError(f"the module needs {what}, which {device.name} lacks; {cure}")


def _refusal(device: Any, log: str) -> KernelCompileError:
    said = log or "it does not say why"
    return KernelCompileError(
        f"the driver of {device.name} does not build the module:\n{said}", log
    )
