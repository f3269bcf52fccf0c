"""Memory put aside, so that the allocations of a block cannot fail."""

from __future__ import annotations

import contextvars
import weakref
from typing import TYPE_CHECKING, Any

from allocator.pool.allocation import Allocation
from allocator.pool.blocks import Block, Heap
from allocator.pool.sizes import parse_size, size_text
from allocator.pool.store import ROUNDING, rounded

if TYPE_CHECKING:
    from allocator.pool.pool import Pool


class Reservation:
    """Bytes of a pool that only the allocations in its ``with`` block are given.

    One block of the pool's heap is held, and cut from its end; what is cut off is from then on a
    block like all others. So nothing is to be moved or handed over when the block ends. Other
    threads and tasks get nothing of it, unless they were started in the block with its context, as
    asyncio starts tasks.

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

    def __init__(self, pool: Pool, nbytes: int | str) -> None:
        """See :meth:`Pool.reserve`."""
        self.nbytes = rounded(parse_size(nbytes, "nbytes"))
        """that are put aside at first."""
        self.pool = pool
        """that they are of."""
        self._holder = Allocation(pool, 0, self.nbytes)
        """the tag of the block that is held; it is in none of the pool's books."""
        self._was_entered = False

    @property
    def heap(self) -> Heap:
        """That its blocks are of."""
        heap = self._holder.heap
        assert heap is not None
        return heap

    @property
    def left(self) -> int:
        """Bytes that are put aside still."""
        block = self._held
        return 0 if block is None else block.size

    def __enter__(self) -> Reservation:
        if self._was_entered:
            raise RuntimeError(f"{self!r} was entered before; make another with Pool.reserve()")
        self._was_entered = True
        self.pool._check_usable()
        try:
            if self.nbytes:
                self.pool._insist(self.nbytes, self._hold)
            _open.set((weakref.ref(self), *_open.get()))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            _open.set(tuple(each for each in _open.get() if each() not in (None, self)))
        finally:
            self._hand_over()
            self.pool.tally()

    def __repr__(self) -> str:
        return f"<reservation of {size_text(self.nbytes)}: {size_text(self.left)} left>"

    def give_back(self) -> None:
        """Make what is left free; in the pool's outermost section."""
        block = self._held
        if block is not None:
            self.heap.free(block)

    def cut(self, nbytes: int, alignment: int) -> Block | None:
        """An allocated block without a tag from the end of what is held, if so much is left.

        Args:
            nbytes: asked for; the block has them rounded up to 512.
            alignment: of its address, a power of two.
        """
        block = self._held
        if block is None:
            return None
        start = block.address + block.size - rounded(nbytes)
        start -= start % alignment
        if start < block.address:
            return None
        self._holder.nbytes = start - block.address
        if start == block.address:
            block.tag = None
            return block
        return _cut_off(block, start)

    @property
    def _held(self) -> Block | None:
        # The tag says whose block it is, also when an exception from outside came between.
        block = self._holder.block
        return block if block is not None and block.tag is self._holder else None

    def _hand_over(self) -> None:
        # The pool does the rest: a generator that is collected may end the block in the middle of
        # the pool's own work.
        self.pool._store.holders.discard(self._holder)
        self.pool._released.append(self)

    def __del__(self) -> None:
        # An exception from outside may have kept __exit__ from its work, or __init__.
        if hasattr(self, "_holder") and self._held is not None:
            self._hand_over()

    def _hold(self) -> None:
        pool = self.pool
        with pool._lock, pool._section as is_outermost:
            if not is_outermost:
                raise RuntimeError(
                    f"reserve() was called in the middle of {pool.name}'s own work, by a finalizer "
                    "or a signal handler; reserve before"
                )
            pool._drain()
            pool._flush_shelves()
            try:
                pool._store.hold(self._holder)
            finally:
                pool._tell_of_segments()


_open: contextvars.ContextVar[tuple[weakref.ref[Reservation], ...]] = contextvars.ContextVar(
    "reservations", default=()
)


def take_reserved(pool: Pool, nbytes: int, alignment: int, queue: Any) -> Allocation | None:
    """Memory from a reservation that is open here, the innermost first."""
    if queue is not None:
        return None  # what is put aside is for the pool's own queue
    store = pool._store
    for reference in _open.get():
        reservation = reference()
        if reservation is None or reservation.pool is not pool:
            continue
        block = reservation.cut(store.bare_room_for(nbytes, alignment), alignment)
        if block is not None:
            heap = reservation.heap
            return store.adopt(pool, block, block.address, nbytes, alignment, heap)
    return None


def _cut_off(block: Block, address: int) -> Block:
    """The end of an allocated block, from this address on, as an allocated block of its own.

    Interrupted before the store into ``block.next`` nothing has happened; after it, ``repair``
    finds both blocks, and the one without a tag is free.
    """
    assert (address - block.address) % ROUNDING == 0
    rest = Block(block.segment, address, block.address + block.size - address)
    rest.is_free = False
    rest.previous = block
    following = rest.next = block.next
    block.next = rest
    block.size -= rest.size
    if following is not None:
        following.previous = rest
    return rest
