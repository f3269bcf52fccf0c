"""Intel GPUs, through SYCL on torch's own stream. Never run: no Intel GPU was available."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fusedoptim.allocator import borrowed_queue
from fusedoptim.launch.backend import Backend, Compiler, LaunchShape
from fusedoptim.launch.sycl import SyclCompiler

if TYPE_CHECKING:
    import torch


class XPU(Backend):
    """A GPU, whose stream keeps torch's work and ours in order."""

    torch_type = "xpu"
    shape = LaunchShape(lanes=256, chunk=64 * 1024, elements_per_group=1)  # not measured
    runs_on_host = False

    def drives(self, sycl_device: Any) -> bool:
        """Whether the device is a GPU."""
        return bool(sycl_device.is_gpu)

    def devices(self) -> Sequence[torch.device]:
        """The GPUs that torch finds."""
        import torch

        count = torch.xpu.device_count() if torch.xpu.is_available() else 0
        return [torch.device("xpu", i) for i in range(count)]

    def queue(self, device: torch.device) -> Any:
        """Torch's current stream."""
        from torch import xpu

        return borrowed_queue(xpu.current_stream(device).sycl_queue)

    def compiler(self, queue: Any, by_sycl: bool = False) -> Compiler:
        """SYCL's compiler."""
        return SyclCompiler.of(queue, is_ordered=False)
