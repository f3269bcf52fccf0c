"""The record of memory that a pool has given out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from allocator.pool.errors import Site

if TYPE_CHECKING:
    from allocator.pool.blocks import Block, Heap
    from allocator.pool.pool import Pool


class Allocation:
    """Memory in use, until the pool has it back.

    Made by :class:`Pool`, whose hooks see it.
    """

    __slots__ = (
        "address",
        "block",
        "frames",
        "handle",
        "heap",
        "is_announced",
        "nbytes",
        "notes",
        "pool",
        "queues",
    )

    def __init__(self, pool: Pool, address: int, nbytes: int) -> None:
        self.pool: Pool | None = pool
        """that it is of, and that lives while it is in use."""
        self.address = address
        """of the first byte."""
        self.nbytes = nbytes
        """bytes asked for."""
        self.heap: Heap | None = None
        """that the block is of; None if the driver gave the memory for this allocation alone."""
        self.block: Block | None = None
        """that it has of the heap."""
        self.handle: Any = None
        """the driver's, where there is no block."""
        self.queues: list[Any] = []
        """other queues that use the memory."""
        self.frames: list[dict[str, Any]] = []
        """the stack that asked for it, where that is recorded."""
        self.is_announced = True
        """whether hooks are told when it is over."""
        self.notes: dict[Any, Any] | None = None
        """what hooks want to find again at the release."""

    @property
    def size(self) -> int:
        """Bytes that it takes of the pool."""
        return self.nbytes if self.block is None else self.block.size

    @property
    def is_small(self) -> bool:
        """Whether it is of a segment for small blocks."""
        return self.block is not None and self.block.segment.is_small

    @property
    def is_ordinary(self) -> bool:
        """Whether the books alone know of it."""
        return self.block is not None and self.notes is None

    @property
    def is_in_use(self) -> bool:
        """Whether it was not released yet."""
        return self.pool is not None and self.pool._store.in_use.get(self.address) is self

    @property
    def site(self) -> str:
        """Where it was asked for, if that was recorded."""
        if not self.frames:
            return "no stack recorded (Pool.record_history())"
        frame = self.frames[0]
        return f"{frame['filename']}:{frame['line']}({frame['name']})"

    def note(self, key: Any, value: Any) -> None:
        """Keep something for a hook until the release.

        Args:
            key: that the hook finds it by in :attr:`notes`, such as itself.
            value: what is kept.
        """
        if self.notes is None:
            self.notes = {}
        self.notes[key] = value


def largest_sites(allocations: Iterable[Allocation], most: int = 5) -> list[Site]:
    """The places that hold the most memory, by their stacks where those are recorded."""
    held: dict[str, tuple[int, int]] = {}
    for allocation in allocations:
        nbytes, blocks = held.get(allocation.site, (0, 0))
        held[allocation.site] = nbytes + allocation.size, blocks + 1
    sites = [Site(where, nbytes, blocks) for where, (nbytes, blocks) in held.items()]
    return sorted(sites, key=lambda site: -site.nbytes)[:most]
