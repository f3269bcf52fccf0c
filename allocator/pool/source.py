"""The driver behind a limit."""

from __future__ import annotations

from typing import Any

from allocator.pool.sizes import size_text
from allocator.runtime.driver import Driver


class Source:
    """Gives segments to a pool's heaps, and knows how much they hold."""

    def __init__(self, driver: Driver, limit: int | None) -> None:
        self._driver = driver
        self.limit = limit
        """bytes that may be held at once, or None."""
        self.reserved = 0
        """bytes held."""
        self.refusal = ""
        """why the last request failed."""

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of so many bytes, and the handle that gives them back.

        Raises:
            MemoryError: the limit or the driver refuses.
        """
        self.check(nbytes)
        try:
            address, memory = self._driver.allocate(nbytes)
        except MemoryError as error:
            self.refusal = str(error)
            raise
        self.reserved += nbytes
        return address, (memory, nbytes)

    def check(self, nbytes: int) -> None:
        """Raise MemoryError if so many bytes more would pass the limit."""
        if self.limit is not None and self.reserved + nbytes > self.limit:
            self.refusal = f"the limit of {size_text(self.limit)}"
            raise MemoryError(self.refusal)

    def release(self, handle: Any) -> None:
        """Give the bytes of ``handle`` back."""
        memory, nbytes = handle
        self.reserved -= nbytes
        self._driver.release(memory)
