"""The memory statistics of ``torch.xpu``, by the same names, for a device's default pool.

torch has one allocator for each device, whose statistics cover all of its memory. Here each pool
has its own statistics. Pools other than the default one have them as methods of the same names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from allocator.pool.defaults import default_pool
from allocator.pool.pool import Pool

_T = TypeVar("_T")


def _of_default_pool(method: Callable[..., _T]) -> Callable[..., _T]:
    """A method of pools as a function of a device, as :func:`default_pool` takes it."""

    @functools.wraps(method)
    def function(device: Any = "cpu", *args: Any, **kwargs: Any) -> _T:
        return method(default_pool(device), *args, **kwargs)

    del function.__wrapped__  # whose signature has no device
    return function


memory_stats = _of_default_pool(Pool.memory_stats)
"""``memory_stats(device="cpu")``: :meth:`Pool.memory_stats` of the default pool."""
memory_allocated = _of_default_pool(Pool.memory_allocated)
"""``memory_allocated(device="cpu")``: :meth:`Pool.memory_allocated` of the default pool."""
memory_reserved = _of_default_pool(Pool.memory_reserved)
"""``memory_reserved(device="cpu")``: :meth:`Pool.memory_reserved` of the default pool."""
max_memory_allocated = _of_default_pool(Pool.max_memory_allocated)
"""``max_memory_allocated(device="cpu")``: :meth:`Pool.max_memory_allocated` of the default pool."""
max_memory_reserved = _of_default_pool(Pool.max_memory_reserved)
"""``max_memory_reserved(device="cpu")``: :meth:`Pool.max_memory_reserved` of the default pool."""
reset_peak_memory_stats = _of_default_pool(Pool.reset_peak_memory_stats)
"""``reset_peak_memory_stats(device="cpu")``: the method of the default pool."""
reset_accumulated_memory_stats = _of_default_pool(Pool.reset_accumulated_memory_stats)
"""``reset_accumulated_memory_stats(device="cpu")``: the method of the default pool."""
memory_summary = _of_default_pool(Pool.memory_summary)
"""``memory_summary(device="cpu", abbreviated=False)``: :meth:`Pool.memory_summary` of the default
pool."""


def memory_snapshot(device: Any = "cpu") -> list[dict[str, Any]]:
    """The segments of the default pool, in torch's format; see :meth:`Pool.snapshot`.

    Args:
        device: the device, as :func:`default_pool` takes it.

    Example:
        >>> from allocator import default_pool
        >>> x = default_pool("cpu").empty(1000)
        >>> sum(segment["allocated_size"] for segment in memory_snapshot("cpu")) >= 4096
        True
    """
    segments: list[dict[str, Any]] = default_pool(device).snapshot()["segments"]
    return segments
