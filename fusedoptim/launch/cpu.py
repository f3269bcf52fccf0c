"""x86 CPUs, by OpenCL's C interface where the driver has one, else by SYCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusedoptim.allocator import queue as shared_queue
from fusedoptim.launch.backend import Backend, Compiler, LaunchShape
from fusedoptim.launch.opencl import driver_of
from fusedoptim.launch.sycl import SyclCompiler

if TYPE_CHECKING:
    import torch


class CPU(Backend):
    """The host itself: kernels read and write ordinary memory."""

    torch_type = "cpu"
    # 16 lanes are the SIMD width of float32 under AVX-512.
    shape = LaunchShape(lanes=16, chunk=32 * 1024, elements_per_group=1024)
    runs_on_host = True

    def drives(self, sycl_device: Any) -> bool:
        """Whether it is a CPU."""
        return bool(sycl_device.is_cpu)

    def devices(self) -> Sequence[torch.device]:
        """The one that torch has."""
        import torch

        return [torch.device("cpu")]

    def queue(self, device: torch.device) -> Any:
        """The one queue that all share."""
        return shared_queue("cpu")

    def compiler(self, queue: Any, by_sycl: bool = False) -> Compiler:
        """OpenCL's driver, on the queue that all share; else SYCL."""
        driver = None
        if not by_sycl and _is_shared(queue):
            driver = driver_of(queue.sycl_device)
        return driver or SyclCompiler.of(queue, is_ordered=True)


def _is_shared(queue: Any) -> bool:
    """Whether the allocator made it: other work on a user's own queue is ordered by SYCL alone."""
    names = "cpu", queue.sycl_device.filter_string
    return any(queue is shared_queue(name) for name in names)
