"""What ``torch.xpu`` has of memory statistics, by the same names, of a device's default pool.

torch's count all memory of a device, for which it has one allocator. Here each pool counts its own:
those that were made or named are not in these figures, and have methods of the same names.
"""

from __future__ import annotations

from typing import Any

from allocator.pool.defaults import default_pool


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
    """Bytes in use of the device's default pool, in whole blocks.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> from allocator import default_pool
        >>> before = memory_allocated("cpu")
        >>> x = default_pool("cpu").empty(1000)
        >>> memory_allocated("cpu") - before
        4096
    """
    return default_pool(device).memory_allocated()


def memory_reserved(device: Any = "cpu") -> int:
    """Bytes that the device's default pool took from the driver.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> memory_reserved("cpu") >= memory_allocated("cpu")
        True
    """
    return default_pool(device).memory_reserved()


def max_memory_allocated(device: Any = "cpu") -> int:
    """The most bytes of the default pool that were in use at once since the last reset.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> max_memory_allocated("cpu") >= memory_allocated("cpu")
        True
    """
    return default_pool(device).max_memory_allocated()


def max_memory_reserved(device: Any = "cpu") -> int:
    """The most bytes that the default pool held of the driver's since the last reset.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> max_memory_reserved("cpu") >= memory_reserved("cpu")
        True
    """
    return default_pool(device).max_memory_reserved()


def reset_peak_memory_stats(device: Any = "cpu") -> None:
    """Start the default pool's peaks anew, from what is current.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> reset_peak_memory_stats("cpu")
        >>> max_memory_allocated("cpu") == memory_allocated("cpu")
        True
    """
    default_pool(device).reset_peak_memory_stats()


def reset_accumulated_memory_stats(device: Any = "cpu") -> None:
    """Start the default pool's sums and counts anew, from 0.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> reset_accumulated_memory_stats("cpu")
        >>> memory_stats("cpu")["allocation.all.allocated"]
        0
    """
    default_pool(device).reset_accumulated_memory_stats()


def memory_summary(device: Any = "cpu", abbreviated: bool = False) -> str:
    """A table of the default pool's counters; see :meth:`Pool.memory_summary`.

    Args:
        device: as :func:`default_pool` takes it.
        abbreviated: does not tell large and small blocks apart.

    Example:
        >>> "allocated_bytes" in memory_summary("cpu")
        True
    """
    return default_pool(device).memory_summary(abbreviated)


def memory_snapshot(device: Any = "cpu") -> list[dict[str, Any]]:
    """The segments of the default pool, in torch's format; see :meth:`Pool.snapshot`.

    Args:
        device: as :func:`default_pool` takes it.

    Example:
        >>> from allocator import default_pool
        >>> x = default_pool("cpu").empty(1000)
        >>> sum(segment["allocated_size"] for segment in memory_snapshot("cpu")) >= 4096
        True
    """
    segments: list[dict[str, Any]] = default_pool(device).snapshot()["segments"]
    return segments
