"""A SPIR-V module built by a device's driver, or the driver's build error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fusedoptim.launch.arguments import Packing
from fusedoptim.launch.backend import BuildError, Compiler, DeviceKernel
from fusedoptim.launch.backend import Program as BuiltProgram
from fusedoptim.launch.devices import backend_of
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
        self._built: dict[Compiler, BuiltProgram] = {}
        self._lock = threading.RLock()  # a signal handler may launch a kernel in the middle

    def kernel(
        self, queue: Any, name: str, packing: Packing, by_sycl: bool = False
    ) -> DeviceKernel:
        """The kernel ``name`` on ``queue``, built at the first call for its device.

        Args:
            queue: a dpctl.SyclQueue.
            name: of the kernel.
            packing: of its arguments.
            by_sycl: whether it must be launched by SYCL.

        Raises:
            InvalidModuleError: the module needs what the device lacks.
            KernelCompileError: the driver refuses it; the message has the driver's log.
        """
        # Variables that outlive a launch must be the same for all launches.
        by_sycl = by_sycl or self.facts.has_globals
        compiler = backend_of(queue).compiler(queue, by_sycl)
        with self._lock:
            if compiler not in self._built:
                device = queue.sycl_device
                check_capabilities(self.facts, device)
                try:
                    self._built[compiler] = compiler.compile(self.spirv, self._options)
                except BuildError as error:
                    raise _refusal(device, error.log) from error
            return self._built[compiler].kernel(queue, name, packing)


def check_capabilities(facts: ModuleFacts, device: Any) -> None:
    """Raise InvalidModuleError if the module needs what the device has not."""
    for number in sorted(facts.capabilities & _ASPECTS.keys()):
        aspect, what, cure = _ASPECTS[number]
        if not getattr(device, f"has_aspect_{aspect}"):
            raise InvalidModuleError(f"the module needs {what}, which {device.name} lacks; {cure}")


def _refusal(device: Any, log: str) -> KernelCompileError:
    said = log or "it gives no reason"
    return KernelCompileError(
        f"the driver of {device.name} does not build the module:\n{said}", log
    )
