"""A memory pool for SYCL devices, and their drivers and queues.

The lowest of fusedoptim's three packages: it finds the driver, makes one queue for each device, and
pools the device's memory. It imports torch and dpctl only when a device is used.
"""

from allocator.exchange.borrowed import from_dlpack
from allocator.exchange.memory import Array, Memory
from allocator.monitoring.advice import Advice, advise
from allocator.monitoring.default_statistics import (
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
from allocator.monitoring.hooks import Hook
from allocator.monitoring.replay import Replay, replay
from allocator.monitoring.scopes import (
    Scope,
    Usage,
    reset_statistics_report,
    statistics,
    statistics_report,
)
from allocator.monitoring.statistics import Health
from allocator.monitoring.timeline import Timeline
from allocator.monitoring.trace import Event, Trace
from allocator.options.budget import Budget
from allocator.options.guard import MemoryCorruptionError
from allocator.options.reserve import Reservation
from allocator.pool.allocation import Allocation
from allocator.pool.blocks import Rules
from allocator.pool.defaults import current_pool, default_pool, empty, full, named_pool, zeros
from allocator.pool.errors import OutOfMemoryError
from allocator.pool.pool import Pool
from allocator.runtime.devices import Device, Devices, devices
from allocator.runtime.fork import check_not_forked, is_forked
from allocator.runtime.isa import ISA_LEVELS, highest_isa, loaded_isa, processor_features
from allocator.runtime.libraries import load_compiler, load_dpctl, load_opencl_compiler
from allocator.runtime.maps import loaded_files
from allocator.runtime.queues import DeviceNotFoundError, borrowed_queue, queue

__fusedoptim__ = "0.1.0"  # by which `fusedoptim.allocator` recognizes this package

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
    "processor_features",
    "queue",
    "replay",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "reset_statistics_report",
    "statistics",
    "statistics_report",
    "zeros",
]
