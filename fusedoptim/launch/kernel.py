"""A compiled module, built for one queue."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fusedoptim.launch.arguments import ONE_ADDRESS
from fusedoptim.launch.backend import BuildError, LaunchShape, Traits
from fusedoptim.launch.devices import backend_of
from fusedoptim.launch.modules import Module, load_module
from fusedoptim.launch.sub_groups import with_sub_groups

_TRAITS = Traits(is_short=True, is_divisible=True)


class Kernel:
    """A compiled module, built for one queue."""

    def __init__(self, queue: Any, module: Module) -> None:
        device = queue.sycl_device
        if module.arithmetic == "float64" and not device.has_aspect_fp64:
            raise RuntimeError(
                f"{device.name} has no float64 arithmetic, so it cannot update float64 parameters; "
                "convert the model to float32 (model.float())"
            )
        self.queue = queue
        self.module = module
        self.layout = module.layout
        self.backend = backend_of(queue)
        self.shape = self.backend.shape
        if module.is_serial:
            self.shape = self.shape._replace(lanes=1, sub_group=None)
        self.head_packing = self.layout.head_packing(module.arithmetic)
        self.real = np.dtype(module.arithmetic)
        """The arithmetic dtype."""
        try:
            program = self.backend.compiler(queue).compile(_spirv(module, self.shape))
            self.on_device = program.kernel(queue, module.name, ONE_ADDRESS, _TRAITS)
            """The compiled kernel, which launches submit."""
        except BuildError as error:
            raise RuntimeError(
                f"the driver of {device.name} ({device.sycl_platform.name}, version "
                f"{device.driver_version}) cannot build the kernel {module.name}; kernels are for "
                "Intel's drivers: pip install intel-opencl-rt, unset OCL_ICD_FILENAMES, and call "
                "allocator.queue() before dpctl is asked for devices, or update the GPU driver"
            ) from error


def _spirv(module: Module, shape: LaunchShape) -> bytes:
    """The module's SPIR-V for this launch shape."""
    return with_sub_groups(module.spirv, shape.sub_group) if shape.sub_group else module.spirv


@functools.cache
def kernel_for(queue: Any, name: str, variant: str) -> Kernel:
    """A variant of the kernel ``name`` on ``queue``, built at the first call."""
    module = load_module(name, variant)
    if module.variant != variant:
        return kernel_for(queue, name, module.variant)
    return Kernel(queue, module)
