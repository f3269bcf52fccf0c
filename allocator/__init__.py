"""SYCL devices for Python programs: the driver found, one queue for each device.

The lowest of fusedoptim's three packages. It imports neither torch nor dpctl until a device is
asked for. The DLPack memory pool that gives the package its name is issue 4 and not here yet.
"""

from allocator._queues import (
    DeviceNotFoundError,
    borrowed_queue,
    check_not_forked,
    is_forked,
    queue,
)
from allocator._runtime import load_compiler, load_dpctl

__fusedoptim__ = "0.1.0"  # what `fusedoptim.allocator` knows us by, should the name be shadowed

__all__ = [
    "DeviceNotFoundError",
    "borrowed_queue",
    "check_not_forked",
    "is_forked",
    "load_compiler",
    "load_dpctl",
    "queue",
]
