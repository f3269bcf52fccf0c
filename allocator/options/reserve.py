"""Reservations: memory put aside, so that the allocations of a block cannot fail."""

from __future__ import annotations

import weakref
from typing import Any

from allocator.pool.allocation import Allocation
from allocator.pool.blocks import Block, Heap, split
from allocator.pool.core import Core, open_reserves
from allocator.pool.sizes import parse_size
from allocator.pool.store import whole_grains
from allocator.runtime.formatting import size_text


class Reservation:
    """Memory of a pool that only the allocations in a ``with`` block may use.

    It holds one block of the pool's heap and splits allocations off its end. These are ordinary
    blocks from then on, and stay valid when the ``with`` block ends. Other threads and tasks get no
    part of it, unless they were started in the block with its context, as asyncio starts tasks.

    Made by :meth:`Pool.reserve`.

    Example:
        >>> from allocator import Pool
        >>> pool = Pool("cpu")
        >>> with pool.reserve("1MiB") as reservation:
        ...     x = pool.empty(1000)
        ...     reservation.left, pool.memory_allocated()
        (1044480, 4096)
        >>> reservation.left
        0
    """

    def __init__(self, pool: Any, core: Core, nbytes: int | str) -> None:
        """See :meth:`Pool.reserve`."""
        self.nbytes = whole_grains(parse_size(nbytes, "nbytes"))
        """bytes put aside at first."""
        self.pool = pool
        """the :class:`Pool` it belongs to."""
        self.core = core
        """core of the pool."""
        self._holder = Allocation(pool, 0, self.nbytes)
        """the tag of the held block, which no counter includes."""
        self._was_entered = False

    @property
    def heap(self) -> Heap:
        """The heap of its blocks."""
        return self.core.store.heap_of(None)

    @property
    def left(self) -> int:
        """Bytes still put aside."""
        block = self._held
        return 0 if block is None else block.size

    def __enter__(self) -> Reservation:
        if self._was_entered:
            raise RuntimeError(f"{self!r} was entered before; make another with Pool.reserve()")
        self._was_entered = True
        self.core.check_usable()
        try:
            if self.nbytes:
                self.core.retry(self.nbytes, self._hold)
            open_reserves.set((weakref.ref(self), *open_reserves.get()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            others = (each for each in open_reserves.get() if each() not in (None, self))
            open_reserves.set(tuple(others))
        finally:
            self._hand_over()
            self.core.update()

    def __repr__(self) -> str:
        return f"<reservation of {size_text(self.nbytes)}: {size_text(self.left)} left>"

    def give_back(self) -> None:
        """Free the remaining memory; in the outermost call."""
        block = self._held
        if block is not None:
            self.heap.free(block)

    def take(self, nbytes: int, alignment: int) -> Allocation | None:
        """An allocation from the end of the remaining memory, if it fits.

        Args:
            nbytes: bytes asked for.
            alignment: alignment of the address, a power of two.
        """
        store = self.core.store
        block = self._cut(store.bare_room_for(nbytes, alignment), alignment)
        if block is None:
            return None
        return store.adopt(self.pool, block, block.address, nbytes, alignment, self.heap)

    def _cut(self, nbytes: int, alignment: int) -> Block | None:
        """An allocated block without a tag from the end of the held one, if it is large enough."""
        block = self._held
        if block is None:
            return None
        start = block.address + block.size - whole_grains(nbytes)
        start -= start % alignment
        if start < block.address:
            return None
        self._holder.nbytes = start - block.address
        if start == block.address:
            block.tag = None
            return block
        return split(block, start - block.address)

    @property
    def _held(self) -> Block | None:
        # The tag says whose block it is, even if an asynchronous exception came in between.
        block = self._holder.block
        return block if block is not None and block.tag is self._holder else None

    def _hand_over(self) -> None:
        # The pool does the rest: a collected generator may end the block in the middle of the
        # pool's own work.
        self.core.store.holders.discard(self._holder)
        self.core.released.append(self)

    def __del__(self) -> None:
        # An asynchronous exception may have interrupted __exit__ or __init__.
        if hasattr(self, "_holder") and self._held is not None:
            self._hand_over()

    def _hold(self) -> None:
        core = self.core
        with core.lock, core.reentrancy as is_outermost:
            if not is_outermost:
                raise RuntimeError(
                    f"reserve() was called in the middle of {core.name}'s own work, by a finalizer "
                    "or a signal handler; reserve earlier, outside finalizers and signal handlers"
                )
            core.drain()
            core.flush_cache()
            try:
                core.store.hold(self._holder)
            finally:
                core.report_segments()
