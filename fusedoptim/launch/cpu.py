"""x86 CPUs, through OpenCL's C interface where the driver has one, else through SYCL."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedoptim.allocator import queue as shared_queue
from fusedoptim.launch.backend import Backend, Compiler, LaunchShape
from fusedoptim.launch.opencl import driver_of
from fusedoptim.launch.sycl import SyclCompiler

if TYPE_CHECKING:
    import torch

_CORES = Path("/sys/devices/system/cpu")
_LEAST_FOR_CORE = 8 * 2**20  # bytes of a batch; at the end of each, cores wait for the last one


class CPU(Backend):
    """The host itself: kernels read and write ordinary memory."""

    torch_type = "cpu"
    # 16 lanes are the SIMD width of float32 under AVX-512.
    shape = LaunchShape(lanes=16, chunk=32 * 1024, elements_per_group=1024)
    runs_on_host = True

    @functools.cached_property
    def batch_bytes(self) -> int:  # type: ignore[override]
        """Half of the third-level cache, or 0 if that is too little for each core."""
        cores = os.sched_getaffinity(0)
        share = _third_level_cache(cores) // 2
        return share if share >= _LEAST_FOR_CORE * len(cores) else 0

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


def _third_level_cache(cores: Collection[int]) -> int:
    """Bytes of the caches that some cores have, or 0 if Linux does not say."""
    sizes = {}
    for core in cores:
        folder = _CORES / f"cpu{core}" / "cache" / "index3"
        try:
            shared_by, size = ((folder / name).read_text() for name in ("shared_cpu_list", "size"))
            sizes[shared_by] = 1024 * int(size.strip().removesuffix("K"))
        except (OSError, ValueError):
            return 0
    return sum(sizes.values())


def _is_shared(queue: Any) -> bool:
    """Whether the queue is the allocator's: only SYCL orders other work on a user's own queue."""
    return queue is shared_queue(queue.sycl_device.filter_string)
