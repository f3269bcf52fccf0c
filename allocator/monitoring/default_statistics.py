"""The memory statistics of ``torch.xpu``, by the same names, for a device's default pool.

torch has one allocator for each device, whose statistics cover all of its memory. Here each pool
has its own statistics. Pools other than the default one have them as methods of the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from allocator.pool.defaults import default_pool
from allocator.pool.pool import Pool

_T = TypeVar("_T", covariant=True)


class _OfDevice(Protocol[_T]):
    def __call__(self, device: Any = "cpu") -> _T: ...


def _of_default_pool(method: Callable[[Pool], _T]) -> _OfDevice[_T]:
    """A method of pools as a function of a device, as :func:`default_pool` takes it."""

    def function(device: Any = "cpu") -> _T:
        return method(default_pool(device))

    function.__name__ = function.__qualname__ = method.__name__
    function.__doc__ = method.__doc__
    function.__annotations__["return"] = method.__annotations__["return"]
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


def memory_summary(device: Any = "cpu", abbreviated: bool = False) -> str:
    """A table of the default pool's counters; see :meth:`Pool.memory_summary`.

    Args:
        device: the device, as :func:`default_pool` takes it.
        abbreviated: leave out the separate figures for large and small blocks.

    Raises:
        TypeError: ``abbreviated`` is not a bool.

    Example:
        >>> "allocated_bytes" in memory_summary("cpu")
        True
    """
    return default_pool(device).memory_summary(abbreviated)


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
