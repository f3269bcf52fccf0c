"""SYCL devices for Python programs: the driver found, one queue for each device.

The lowest of fusedoptim's three packages: it finds the driver, gives one queue for each device,
and pools the device's memory. It imports neither torch nor dpctl until a device is asked for.
"""

from allocator._advice import Advice, advise
from allocator._allocation import Allocation
from allocator._blocks import Rules
from allocator._budget import Budget
from allocator._default import current_pool, default_pool, empty, full, named_pool, zeros
from allocator._default_statistics import (
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)
from allocator._devices import Device, Devices, devices
from allocator._errors import OutOfMemoryError
from allocator._guard import MemoryCorruptionError
from allocator._hooks import Hook
from allocator._isa import ISA_LEVELS, highest_isa, loaded_isa
from allocator._maps import loaded_files
from allocator._memory import Array, Memory, from_dlpack
from allocator._plan import Plan
from allocator._pool import Pool
from allocator._queues import (
    DeviceNotFoundError,
    borrowed_queue,
    check_not_forked,
    is_forked,
    queue,
)
from allocator._replay import Replay, replay
from allocator._reserve import Reservation
from allocator._runtime import load_compiler, load_dpctl, load_opencl_compiler
from allocator._scopes import (
    Scope,
    Usage,
    reset_statistics_report,
    statistics,
    statistics_report,
)
from allocator._statistics import Health
from allocator._timeline import Timeline
from allocator._trace import Event, Trace

__fusedoptim__ = "0.1.0"  # what `fusedoptim.allocator` knows us by, should the name be shadowed

__all__ = [
    "ISA_LEVELS",
    "Advice",
    "Allocation",
    "Array",
    "Budget",
    "Device",
    "DeviceNotFoundError",
    "Devices",
    "Event",
    "Health",
    "Hook",
    "Memory",
    "MemoryCorruptionError",
    "OutOfMemoryError",
    "Plan",
    "Pool",
    "Replay",
    "Reservation",
    "Rules",
    "Scope",
    "Timeline",
    "Trace",
    "Usage",
    "advise",
    "borrowed_queue",
    "check_not_forked",
    "current_pool",
    "default_pool",
    "devices",
    "empty",
    "from_dlpack",
    "full",
    "highest_isa",
    "is_forked",
    "load_compiler",
    "load_dpctl",
    "load_opencl_compiler",
    "loaded_files",
    "loaded_isa",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_snapshot",
    "memory_stats",
    "memory_summary",
    "named_pool",
    "queue",
    "replay",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "reset_statistics_report",
    "statistics",
    "statistics_report",
    "zeros",
]
