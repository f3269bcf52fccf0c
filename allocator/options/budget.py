"""Budgets: limits on how much of a pool one part of a program may hold."""

from __future__ import annotations

import contextvars
import gc
from collections.abc import Callable
from typing import Any

from allocator.monitoring.hooks import Hook
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.errors import OutOfMemoryError
from allocator.pool.sizes import parse_size
from allocator.pool.store import whole_grains
from allocator.runtime.formatting import size_text


class _Charge:
    """An allocation's share of a budget, open or not, until its release."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.size = 0

    def credit(self) -> None:
        """Subtract it from the budget; after an interrupt this may run twice."""
        self._budget._used -= self.size
        self.size = 0


class Budget(Hook):
    """A limit on the bytes that allocations made in a ``with`` block may hold at once.

    Each allocation counts with its size rounded up to 512 bytes, for all budgets that are open,
    until its release in the block or after it. Other threads and tasks do not count, unless they
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
        core: Core,
        limit: int | str,
        name: str | None,
        on_exceed: Callable[[Budget, int], bool] | None,
    ) -> None:
        """See :meth:`Pool.budget`."""
        if on_exceed is not None and not callable(on_exceed):
            raise TypeError(
                f"on_exceed={on_exceed!r} is not a function; pass one that takes (budget, nbytes) "
                "and returns whether to try again, or None"
            )
        self.limit = parse_size(limit, "limit")
        """most bytes in use at once."""
        self.name = name
        """name in messages."""
        self._core = core
        self._on_exceed = on_exceed
        self._used = 0
        self._peak = 0
        self._is_open = False

    @property
    def used(self) -> int:
        """Bytes in use by its allocations."""
        self._core.update()  # takes in what was released
        return self._used

    @property
    def peak(self) -> int:
        """Most bytes in use at once so far."""
        return self._peak

    def __enter__(self) -> Budget:
        if self._is_open:
            raise RuntimeError(f"{self!r} is open; make another with Pool.budget()")
        self._is_open = True
        try:
            self._core.add_hook(self)
            _open.set((*_open.get(), self))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            _open.set(tuple(budget for budget in _open.get() if budget is not self))
        finally:
            self._core.remove_hook(self)
            self._is_open = False

    def __repr__(self) -> str:
        return f"<{self._text}: {size_text(self._used)} in use>"

    def before_allocate(self, pool: Any, nbytes: int) -> None:
        """Refuse an allocation that does not fit, once nothing more can be freed for it."""
        if self not in _open.get() or self._has_room(nbytes):
            return
        self._core.update()
        if not self._has_room(nbytes):
            gc.collect()  # tensors in reference cycles
            self._core.update()
        while not self._has_room(nbytes):
            if self._on_exceed is None or not self._on_exceed(self, nbytes):
                raise self._exceeded(nbytes)
            self._core.update()

    def allocated(self, pool: Any, allocation: Allocation) -> None:
        """Charge the allocation."""
        if self not in _open.get():
            return
        size, charge = whole_grains(allocation.nbytes), _Charge(self)
        allocation.charges = (*allocation.charges, charge.credit)
        with self._core.lock:  # threads that run in copies of one context share its budgets
            if not self._has_room(allocation.nbytes):
                raise self._exceeded(allocation.nbytes)
            # No call lies in between, so no asynchronous exception: both change or neither does.
            self._used += size
            charge.size = size
            self._peak = max(self._peak, self._used)

    def _has_room(self, nbytes: int) -> bool:
        return self._used + whole_grains(nbytes) <= self.limit

    def _exceeded(self, nbytes: int) -> OutOfMemoryError:
        reason = f"{self._text}, of which {size_text(self._used)} are in use; raise its limit"
        return self._core.out_of_memory_error(nbytes, reason)

    @property
    def _text(self) -> str:
        which = "a budget" if self.name is None else f"the budget {self.name!r}"
        return f"{which} of {size_text(self.limit)}"


_open: contextvars.ContextVar[tuple[Budget, ...]] = contextvars.ContextVar("budgets", default=())
