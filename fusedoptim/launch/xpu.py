"""Intel GPUs, by SYCL on torch's own stream. Never run: no Intel GPU was at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fusedoptim.allocator import borrowed_queue
from fusedoptim.launch import sycl
from fusedoptim.launch.backend import Backend, Launcher, LaunchShape

if TYPE_CHECKING:
    import torch

    from fusedoptim.launch.modules import Module


class XPU(Backend):
    """A GPU, whose stream keeps the order of torch's work and ours."""

    torch_type = "xpu"
    shape = LaunchShape(lanes=256, chunk=64 * 1024, elements_per_group=1)  # not measured
    runs_on_host = False

    def drives(self, sycl_device: Any) -> bool:
        """Whether it is no CPU: what SYCL has besides are accelerators."""
        return not sycl_device.is_cpu

    def queue(self, device: torch.device) -> Any:
        """Torch's current stream."""
        from torch import xpu

        return borrowed_queue(xpu.current_stream(device).sycl_queue)

    def build(self, queue: Any, module: Module) -> Callable[[], Launcher]:
        """See :meth:`Backend.build`."""
        return sycl.build_launcher(queue, module, self.shape.lanes)
