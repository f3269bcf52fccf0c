"""Scopes: statistics of the allocations of a block of code, in all pools."""

from __future__ import annotations

import contextvars
import os
import sys
import threading
import weakref
from typing import Any, NamedTuple

from allocator.monitoring.hooks import Hook
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.counters import Level
from allocator.runtime.fork import renew_lock_in_child
from allocator.runtime.formatting import size_text

_lock = threading.RLock()  # protects the three below; never held while a pool is called
renew_lock_in_child(globals())
_cores: weakref.WeakSet[Core] = weakref.WeakSet()
_open: list[Scope] = []
_records: dict[tuple[str, str], tuple[int, int, int]] = {}
"""the peak, number of blocks and total bytes of finished scopes, by name and place."""

_entered: contextvars.ContextVar[tuple[Scope, ...]] = contextvars.ContextVar("scopes", default=())


class Usage(NamedTuple):
    """The allocations of a scope, in whole blocks."""

    current_bytes: int
    """Bytes not released yet."""
    peak_bytes: int
    """Most bytes in use at once."""
    total_bytes: int
    """Bytes of all allocations, released or not."""
    current_count: int
    """Allocations not released yet."""
    peak_count: int
    """Most allocations in use at once."""
    total_count: int
    """Number of all allocations."""


class _Counter:
    """The counters of a :class:`Usage`."""

    # No lock: the interpreter switches threads and collects garbage only at calls, and the levels
    # make none.
    def __init__(self) -> None:
        self._bytes, self._count = Level(), Level()

    def rise(self, nbytes: int) -> None:
        self._bytes.rise(nbytes)
        self._count.rise(1)

    def fall(self, nbytes: int) -> None:
        self._bytes.fall(nbytes)
        self._count.fall(1)

    def usage(self) -> Usage:
        size, count = self._bytes, self._count
        return Usage(
            size.current, size.peak, size.allocated, count.current, count.peak, count.allocated
        )


class Scope(Hook):
    """Counts the allocations of its ``with`` block.

    Made by :func:`statistics`. Allocations of other threads are not counted, but releases in any
    thread are.
    """

    def __init__(self, name: str, where: str) -> None:
        self.name = name
        """name in the report."""
        self.where = where
        """place of the block, as file:line(function)."""
        self._all = _Counter()
        self._by_pool: dict[str, _Counter] = {}
        self._was_entered = False
        self._is_open = False

    @property
    def usage(self) -> Usage:
        """Usage of all pools; after the block, the usage at its end."""
        self._take_in_releases()
        return self._all.usage()

    @property
    def pools(self) -> dict[str, Usage]:
        """Usage of each pool by its name; pools of the same name count as one."""
        self._take_in_releases()
        return {name: counter.usage() for name, counter in self._by_pool.items()}

    def __enter__(self) -> Scope:
        if self._was_entered:
            raise RuntimeError("a scope can be entered only once; call statistics() for another")
        self._was_entered = self._is_open = True
        try:
            with _lock:
                _open.append(self)
                cores = list(_cores)
            _entered.set((*_entered.get(), self))
            for core in cores:
                core.add_hook(self)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            usage = self.usage  # the longest part, so the one that an interrupt is likely to hit
            with _lock:
                peak, calls, total = _records.get((self.name, self.where), (0, 0, 0))
                peak, total = max(peak, usage.peak_bytes), total + usage.total_bytes
                _records[self.name, self.where] = peak, calls + 1, total
        finally:
            self._leave()

    def _leave(self) -> None:
        """Stop counting, wherever __enter__ or __exit__ was interrupted."""
        self._is_open = False
        _entered.set(tuple(scope for scope in _entered.get() if scope is not self))
        with _lock:
            _open[:] = [scope for scope in _open if scope is not self]
            cores = list(_cores)
        for core in cores:
            core.remove_hook(self)

    def allocated(self, pool: Any, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        if self not in _entered.get():
            return
        counter = self._by_pool.setdefault(pool.name, _Counter())
        allocation.note(self, counter)
        self._all.rise(allocation.size)
        counter.rise(allocation.size)

    def released(self, pool: Any, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        if allocation.notes is not None and self in allocation.notes:
            self._all.fall(allocation.size)
            allocation.notes[self].fall(allocation.size)

    def __repr__(self) -> str:
        usage = self._all.usage()
        return (
            f"<statistics {self.name!r}: {size_text(usage.current_bytes)} now, at most "
            f"{size_text(usage.peak_bytes)}, {size_text(usage.total_bytes)} in "
            f"{usage.total_count} allocations>"
        )

    def _take_in_releases(self) -> None:
        if self._is_open:
            with _lock:
                cores = list(_cores)
            for core in cores:
                core.update()


def statistics(name: str | None = None) -> Scope:
    """Count the allocations of this thread or task in a ``with`` block, of all pools.

    Blocks may be nested; the outer one includes the inner one's allocations.

    Args:
        name: name in :func:`statistics_report`; if None, the name of the enclosing function.

    Example:
        >>> from allocator import Pool, statistics
        >>> pool = Pool("cpu")
        >>> with statistics("forward") as scope:
        ...     for _ in range(3):
        ...         x = pool.empty(1000)
        >>> scope.usage.total_count, scope.usage.total_bytes, scope.usage.current_bytes
        (3, 12288, 4096)
    """
    frame = sys._getframe(1)
    function = frame.f_code.co_name
    file = os.path.basename(frame.f_code.co_filename)
    return Scope(name or function, f"{file}:{frame.f_lineno}({function})")


def statistics_report() -> str:
    """A table of all finished blocks of :func:`statistics`, the highest peak first.

    Example:
        >>> from allocator import statistics, statistics_report
        >>> with statistics("forward"):
        ...     pass
        >>> print(statistics_report().splitlines()[0])
             calls          peak         total  name, place
    """
    with _lock:
        rows = [(*record, *key) for key, record in _records.items()]
    lines = [f"{'calls':>10}{'peak':>14}{'total':>14}  name, place"]
    for peak, calls, total, name, where in sorted(rows, reverse=True):
        lines.append(f"{calls:>10}{size_text(peak):>14}{size_text(total):>14}  {name}, {where}")
    return "\n".join(lines)


def reset_statistics_report() -> None:
    """Forget the finished blocks.

    Example:
        >>> reset_statistics_report()
        >>> len(statistics_report().splitlines())
        1
    """
    with _lock:
        _records.clear()


def register(core: Core) -> None:
    """Make open and later scopes count a pool's allocations."""
    with _lock:
        _cores.add(core)
        scopes = list(_open)
    for scope in scopes:
        core.add_hook(scope)
