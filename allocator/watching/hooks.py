"""What may watch a pool, refuse an allocation, or help when there is no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allocator.pool.allocation import Allocation
    from allocator.pool.pool import Pool


class Hook:
    """Base of what is told of a pool's allocations; override what you need.

    Allocations of no bytes take none, and are not told of. One that a finalizer or a signal handler
    makes in the middle of the pool's own work has memory of the driver for itself, of which
    :meth:`grown` does not tell: its :attr:`Allocation.block` is None.

    Example:
        >>> from allocator import Pool
        >>> class Largest(Hook):
        ...     nbytes = 0
        ...
        ...     def allocated(self, pool, allocation):
        ...         self.nbytes = max(self.nbytes, allocation.nbytes)
        >>> largest, pool = Largest(), Pool("cpu")
        >>> with pool.hook(largest):
        ...     x = pool.empty(1000)
        >>> largest.nbytes
        4000
    """

    def before_allocate(self, pool: Pool, nbytes: int) -> None:
        """So many bytes are asked for; raise to refuse them.

        Args:
            pool: that is asked.
            nbytes: asked for.
        """

    def allocated(self, pool: Pool, allocation: Allocation) -> None:
        """They were found. If this raises, they go back, and the caller gets the error.

        Args:
            pool: that was asked.
            allocation: what it found.
        """

    def released(self, pool: Pool, allocation: Allocation) -> None:
        """Memory came back. An error here is reported through :data:`sys.unraisablehook`.

        Args:
            pool: that has it back.
            allocation: that is over; its fields are as they were.
        """

    def grown(self, pool: Pool, address: int, nbytes: int) -> None:
        """The driver gave a segment.

        Args:
            pool: that asked for it.
            address: of its first byte.
            nbytes: of it.
        """

    def shrunk(self, pool: Pool, address: int, nbytes: int) -> None:
        """The driver got a segment back.

        Args:
            pool: that had it.
            address: of its first byte.
            nbytes: of it.
        """

    def out_of_memory(self, pool: Pool, nbytes: int) -> bool:
        """So many bytes cannot be had; drop something and return True for another try.

        Args:
            pool: that has no room.
            nbytes: asked for.

        Returns:
            whether to try again.
        """
        return False
