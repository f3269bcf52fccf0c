"""x86 CPUs, by OpenCL's C interface where the driver has one, else by SYCL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusedoptim.allocator import queue
from fusedoptim.launch import sycl
from fusedoptim.launch.backend import Backend, Launcher, LaunchShape
from fusedoptim.launch.opencl import OpenCLLauncher, driver_of

if TYPE_CHECKING:
    import torch

    from fusedoptim.launch.modules import Module


class CPU(Backend):
    """The host itself: kernels read and write ordinary memory."""

    torch_type = "cpu"
    # 16 lanes are the SIMD width of float32 under AVX-512.
    shape = LaunchShape(lanes=16, chunk=32 * 1024, elements_per_group=1024)
    runs_on_host = True

    def drives(self, sycl_device: Any) -> bool:
        """Whether it is a CPU."""
        return bool(sycl_device.is_cpu)

    def queue(self, device: torch.device) -> Any:
        """The one queue that all share."""
        return queue("cpu")

    def build(self, queue: Any, module: Module) -> Callable[[], Launcher]:
        """See :meth:`Backend.build`."""
        driver = driver_of(queue.sycl_device)
        if driver is None:
            return sycl.build_launcher(queue, module, self.shape.lanes)
        program = driver.program(module.spirv)
        return functools.partial(OpenCLLauncher, driver, program, module.name, self.shape.lanes)
