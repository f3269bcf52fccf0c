"""x86 CPUs, through OpenCL's C interface where the driver has one, else through SYCL."""

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
    # 16 lanes are the SIMD width of float32 under AVX-512. Under AVX2 the driver would take 8: a
    # group would walk each row twice, and read half of every cache line each time.
    shape = LaunchShape(lanes=16, chunk=32 * 1024, elements_per_group=1024, sub_group=16)
    runs_on_host = True

    def drives(self, sycl_device: Any) -> bool:
        """Whether the device is a CPU."""
        return bool(sycl_device.is_cpu)

    def devices(self) -> Sequence[torch.device]:
        """Torch's CPU device."""
        import torch

        return [torch.device("cpu")]

    def queue(self, device: torch.device) -> Any:
        """The CPU's queue, which all callers share."""
        return shared_queue("cpu")

    def compiler(self, queue: Any, by_sycl: bool = False) -> Compiler:
        """OpenCL's driver for the shared queue; otherwise SYCL."""
        driver = None
        if not by_sycl and _is_shared(queue):
            driver = driver_of(queue.sycl_device)
        return driver or SyclCompiler.of(queue, is_ordered=True)


def _is_shared(queue: Any) -> bool:
    """Whether the queue is the allocator's: only SYCL orders other work on a user's own queue."""
    return queue is shared_queue(queue.sycl_device.filter_string)
