"""The record of memory that a pool has allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from allocator.pool.blocks import Block, Heap
from allocator.pool.errors import Site


class Allocation:
    """Memory in use, until the pool has taken it back.

    Made by :class:`Pool`, whose hooks see it.
    """

    __slots__ = (
        "_in_use",
        "address",
        "block",
        "charges",
        "frames",
        "handle",
        "heap",
        "is_announced",
        "nbytes",
        "notes",
        "pool",
        "queues",
    )

    def __init__(
        self, pool: Any, address: int, nbytes: int, in_use: dict[int, Allocation] | None = None
    ) -> None:
        """A record; the dict ``in_use`` contains it, by address, while it is in use."""
        self.pool = pool
        """the :class:`Pool` it belongs to, kept alive by it; None once released."""
        self.address = address
        """address of the first byte."""
        self.nbytes = nbytes
        """bytes asked for."""
        self.heap: Heap | None = None
        """heap of the block; None if the memory came directly from the driver."""
        self.block: Block | None = None
        """block of the heap."""
        self.handle: Any = None
        """the driver's handle, if there is no block."""
        self.queues: list[Any] = []
        """other queues that use the memory."""
        self.frames: list[dict[str, Any]] = []
        """stack of the call that asked for it, if recorded."""
        self.is_announced = True
        """whether hooks are told of the release."""
        self.notes: dict[Any, Any] | None = None
        """objects that hooks stored with :meth:`note`."""
        self.charges: tuple[Callable[[], None], ...] = ()
        """calls that credit the budgets it was charged to; a second call changes nothing."""
        self._in_use = in_use

    @property
    def size(self) -> int:
        """The bytes that the allocation takes up in the pool."""
        return self.nbytes if self.block is None else self.block.size

    @property
    def is_small(self) -> bool:
        """Whether the allocation lies in a segment for small blocks."""
        return self.block is not None and self.block.segment.is_small

    @property
    def is_ordinary(self) -> bool:
        """Whether only the pool's block records know of it."""
        return self.block is not None and self.notes is None and not self.charges

    @property
    def is_in_use(self) -> bool:
        """Whether the allocation was not released yet."""
        return self._in_use is not None and self._in_use.get(self.address) is self

    @property
    def stream(self) -> int:
        """The number of its queue: 0 for the pool's own."""
        return 0 if self.heap is None else self.heap.number

    @property
    def site(self) -> str:
        """The place in the program that asked for the allocation, if recorded."""
        if not self.frames:
            return "no stack recorded (Pool.record_history())"
        frame = self.frames[0]
        return f"{frame['filename']}:{frame['line']}({frame['name']})"

    def note(self, key: Any, value: Any) -> None:
        """Store something for a hook until the release.

        Args:
            key: key in :attr:`notes`, such as the hook itself.
            value: the object to store.
        """
        if self.notes is None:
            self.notes = {}
        self.notes[key] = value


def largest_sites(allocations: Iterable[Allocation]) -> list[Site]:
    """The five places in the program that hold the most memory, if stacks are recorded."""
    sites: dict[str, Site] = {}
    for allocation in allocations:
        where, nbytes, blocks = sites.get(allocation.site, Site(allocation.site, 0, 0))
        sites[where] = Site(where, nbytes + allocation.size, blocks + 1)
    return sorted(sites.values(), key=lambda site: -site.nbytes)[:5]
