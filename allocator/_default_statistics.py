"""What ``torch.xpu`` has of memory statistics, by the same names, of a device's default pool.

torch's count all memory of a device, for which it has one allocator. Here each pool counts its own:
those that were made or named are not in these figures, and have methods of the same names.
"""

from __future__ import annotations

from typing import Any

from allocator._default import default_pool


def memory_stats(device: Any = "cpu") -> dict[str, Any]:
    """The counters of the device's default pool; see :meth:`Pool.memory_stats`.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> memory_stats("cpu")["num_ooms"]
        0
    """
    return default_pool(device).memory_stats()


def memory_allocated(device: Any = "cpu") -> int:
    """Bytes in use of the device's default pool, in whole blocks."""
    return default_pool(device).memory_allocated()


def memory_reserved(device: Any = "cpu") -> int:
    """Bytes that the device's default pool took from the driver."""
    return default_pool(device).memory_reserved()


def max_memory_allocated(device: Any = "cpu") -> int:
    """The most bytes of the default pool that were in use at once since the last reset."""
    return default_pool(device).max_memory_allocated()


def max_memory_reserved(device: Any = "cpu") -> int:
    """The most bytes that the default pool held of the driver's since the last reset."""
    return default_pool(device).max_memory_reserved()


def reset_peak_memory_stats(device: Any = "cpu") -> None:
    """Start the default pool's peaks anew, from what is current."""
    default_pool(device).reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: Any = "cpu") -> None:
    """Start the default pool's sums and counts anew, from 0."""
    default_pool(device).reset_accumulated_memory_stats()


def memory_summary(device: Any = "cpu", abbreviated: bool = False) -> str:
    """A table of the default pool's counters; see :meth:`Pool.memory_summary`."""
    return default_pool(device).memory_summary(abbreviated)


def memory_snapshot(device: Any = "cpu") -> list[dict[str, Any]]:
    """The segments of the default pool, in torch's format; see :meth:`Pool.snapshot`."""
    segments: list[dict[str, Any]] = default_pool(device).snapshot()["segments"]
    return segments
