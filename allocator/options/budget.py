"""Limits on what one part of a program may hold of a pool."""

from __future__ import annotations

import contextvars
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from allocator.pool.errors import OutOfMemoryError
from allocator.pool.sizes import parse_size, size_text
from allocator.pool.store import rounded
from allocator.watching.hooks import Hook

if TYPE_CHECKING:
    from allocator.pool.allocation import Allocation
    from allocator.pool.pool import Pool


class _Charge:
    """What an allocation takes of a budget."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class Budget(Hook):
    """The most bytes that allocations made in a ``with`` block may hold at once.

    Each counts for its size rounded up to 512 bytes. What is released is credited, in the block
    and after it. Of nested budgets all are charged. Other threads and tasks are not, unless they
    were started in the block with its context, as asyncio starts tasks.

    Made by :meth:`Pool.budget`.

    Example:
        >>> from allocator import Pool
        >>> pool = Pool("cpu")
        >>> with pool.budget("1MiB", "scratch") as budget:
        ...     x = pool.empty(1000)
        ...     y = pool.empty(1 << 20)
        Traceback (most recent call last):
        ...
        allocator.pool.errors.OutOfMemoryError: pool of device ... has no room for 4 MiB: ...
        >>> budget.used, budget.peak, budget.limit
        (4096, 4096, 1048576)
    """

    def __init__(
        self,
        pool: Pool,
        limit: int | str,
        name: str | None = None,
        on_exceed: Callable[[Budget, int], bool] | None = None,
    ) -> None:
        """See :meth:`Pool.budget`."""
        if on_exceed is not None and not callable(on_exceed):
            raise TypeError(
                f"on_exceed={on_exceed!r} is no function; pass one of (budget, nbytes) that "
                "returns whether to try again, or None"
            )
        self.limit = parse_size(limit, "limit")
        """bytes."""
        self.name = name
        """in messages."""
        self._pool = pool
        self._on_exceed = on_exceed
        self._used = 0
        self._peak = 0
        self._is_open = False

    @property
    def used(self) -> int:
        """Bytes that its allocations hold."""
        self._pool.tally()  # takes in what was released
        return self._used

    @property
    def peak(self) -> int:
        """The most that they held at once."""
        return self._peak

    def __enter__(self) -> Budget:
        if self._is_open:
            raise RuntimeError(f"{self!r} is open; make another with Pool.budget()")
        self._is_open = True
        try:
            self._pool.add_hook(self)
            _open.set((*_open.get(), self))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            _open.set(tuple(budget for budget in _open.get() if budget is not self))
        finally:
            self._pool.remove_hook(self)
            self._is_open = False

    def __repr__(self) -> str:
        return f"<{self._text}: {size_text(self._used)} in use>"

    def before_allocate(self, pool: Pool, nbytes: int) -> None:
        """Refuse what does not fit, once nothing more can be dropped for it."""
        if self not in _open.get() or self._has_room(nbytes):
            return
        pool.tally()
        if self._has_room(nbytes):
            return
        gc.collect()  # tensors in cycles of references
        pool.tally()
        while not self._has_room(nbytes):
            if self._on_exceed is None or not self._on_exceed(self, nbytes):
                raise self._exceeded(nbytes)
            pool.tally()

    def allocated(self, pool: Pool, allocation: Allocation) -> None:
        """Charge the allocation."""
        if self not in _open.get():
            return
        size, charge = rounded(allocation.nbytes), _Charge()
        allocation.note(self, charge)
        with pool._lock:  # threads that run in copies of one context share its budgets
            if not self._has_room(allocation.nbytes):
                raise self._exceeded(allocation.nbytes)
            # No call is in between, so no exception from outside is: what is used is charged.
            self._used += size
            charge.size = size
            self._peak = max(self._peak, self._used)

    def _has_room(self, nbytes: int) -> bool:
        return self._used + rounded(nbytes) <= self.limit

    def _exceeded(self, nbytes: int) -> OutOfMemoryError:
        reason = f"{self._text}, of which {size_text(self._used)} are in use"
        return self._pool._explained(nbytes, MemoryError(reason))

    @property
    def _text(self) -> str:
        which = "a budget" if self.name is None else f"the budget {self.name!r}"
        return f"{which} of {size_text(self.limit)}"


_open: contextvars.ContextVar[tuple[Budget, ...]] = contextvars.ContextVar("budgets", default=())


def credit(allocation: Allocation) -> None:
    """The allocation is over: take it off the budgets that were charged, open or not."""
    if allocation.notes is None:
        return
    for hook, charge in list(allocation.notes.items()):
        if isinstance(hook, Budget):
            hook._used -= charge.size
            charge.size = 0  # of what is taken back twice, as after an interrupt, nothing is left
