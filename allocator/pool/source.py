"""Segments from the driver, up to a limit."""

from __future__ import annotations

from typing import Any

from allocator.pool.driver import Driver
from allocator.pool.sizes import as_number, parse_size
from allocator.runtime.formatting import size_text


class Source:
    """Gives segments to a pool's heaps, and counts what they hold."""

    def __init__(self, driver: Driver, limit: int | None) -> None:
        self.driver = driver
        self.limit = limit
        """bytes that may be held at once, or None."""
        self.reserved = 0
        """bytes held."""

    @property
    def is_over_limit(self) -> bool:
        """Whether more is held than the limit allows, after it was lowered."""
        return self.limit is not None and self.reserved > self.limit

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of new memory, and the handle that returns it; raises MemoryError."""
        self.check(nbytes)
        address, memory = self.driver.allocate(nbytes)
        self.reserved += nbytes
        return address, (memory, nbytes)

    def check(self, nbytes: int) -> None:
        """Raise MemoryError if this many bytes more would pass the limit."""
        if self.limit is not None and self.reserved + nbytes > self.limit:
            raise MemoryError(f"the limit of {size_text(self.limit)}")

    def release(self, handle: Any) -> None:
        """Return the memory of ``handle`` to the driver."""
        memory, nbytes = handle
        self.reserved -= nbytes
        self.driver.release(memory)


class QueueSource:
    """Gives segments to the heap of a queue other than the pool's own."""

    def __init__(self, source: Source, queue: Any) -> None:
        self._source = source
        self._queue = queue

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of new memory, and the handle that returns it; raises MemoryError."""
        return self._source.allocate(nbytes)

    def release(self, handle: Any) -> None:
        """Return the memory of ``handle`` once the queue has finished its work.

        The driver waits for the pool's own queue only.
        """
        self._queue.wait()
        self._source.release(handle)


def limit_of(limit: int | str | None, fraction: float | None, capacity: int) -> int | None:
    """The limit in bytes, from a size or a fraction of a device's capacity."""
    if limit is not None and fraction is not None:
        raise ValueError(f"limit={limit!r} and fraction={fraction!r} exclude each other")
    if fraction is not None:
        if not 0 < as_number(fraction, "fraction") <= 1:
            raise ValueError(f"fraction={fraction!r} is not in (0, 1]")
        return int(fraction * capacity)
    return None if limit is None else parse_size(limit, "limit")
