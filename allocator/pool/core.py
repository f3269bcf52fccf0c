"""The core of a pool: allocation, release, and recovery from interrupts.

:class:`allocator.Pool` is the interface for users. Its options and reports build on the public
methods and attributes of :class:`Core`.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, TypeVar

from allocator.exchange.exports import REUSES_CAPSULES, Export, Exporter
from allocator.exchange.reuse import Entry, ReuseCache
from allocator.monitoring.hooks import Hook, Hooks, check_hook
from allocator.pool import lifecycle
from allocator.pool.allocation import Allocation, largest_sites
from allocator.pool.blocks import GRAIN
from allocator.pool.counters import Counters
from allocator.pool.errors import OutOfMemoryError
from allocator.pool.reentrancy import ReentrancyGuard
from allocator.pool.store import Store

_T = TypeVar("_T")


class Reserve(Protocol):
    """Memory put aside, which serves allocations before the heaps do."""

    @property
    def core(self) -> Core:
        """The core that it belongs to."""

    def take(self, nbytes: int, alignment: int) -> Allocation | None:
        """An allocation for the pool's own queue, if there is room for it."""

    def give_back(self) -> None:
        """Free the rest, in the outermost call."""


open_reserves: contextvars.ContextVar[tuple[weakref.ref[Reserve], ...]] = contextvars.ContextVar(
    "reserves", default=()
)
"""Reserves whose ``with`` blocks are open here, the innermost first."""


class Debugger(Protocol):
    """The debug mode of a pool, as its core calls it. Its findings are raised later."""

    def ended(self, export: int, allocation: Allocation | None) -> None:
        """A consumer called the deleter of the export at this address."""

    def deleted_again(self, export: int) -> None:
        """A consumer called the deleter although it had been called before."""

    def discharge(self, most: int | None) -> Iterable[Allocation]:
        """The allocations that leave quarantine, until it has at most ``most`` bytes.

        None lets it hold as many as it may.
        """

    def quarantined(self) -> Collection[Allocation]:
        """The allocations in quarantine, after an asynchronous exception."""

    def check(self, core: Core) -> None:
        """Check all memory in use or in quarantine."""

    def raise_found(self) -> None:
        """Raise the oldest problem that was not raised yet, if there is one."""

    def report(self, core: Core) -> None:
        """Write all problems to stderr, as no later call can raise them."""


class Core:
    """Allocates memory, takes it back, and repairs its records after an interrupt.

    Methods that say "in the outermost call" need ``with core.lock, core.reentrancy as
    is_outermost`` around them, and ``is_outermost`` to be true.
    """

    def __init__(self, pool: Any, store: Store, name: str, kind: str) -> None:
        self.pool = weakref.ref(pool)
        """the :class:`Pool`, which owns the core."""
        self.name = name
        self.kind = kind
        self.store = store
        self.lock = threading.RLock()
        self.reentrancy = ReentrancyGuard(self._recover)
        self.hooks = Hooks()
        self.debugger: Debugger | None = None
        self.cache = ReuseCache()
        self.released: deque[Allocation | Reserve] = deque()
        """Allocations released without a DLPack deleter; finalizers append to it."""
        self.is_closed = False
        self._process = os.getpid()
        self.exporter = Exporter.obtain()  # last: __del__ returns it
        for core in lifecycle.cores():
            core.drain_if_idle()  # frees pools that only released tensors keep alive
        lifecycle.register(self)

    # ------------------------------------------------------------------ state

    @property
    def is_in_own_process(self) -> bool:
        """Whether this process made the pool, and is not a fork of the one that did."""
        return self._process == os.getpid()

    @property
    def bypasses_cache(self) -> bool:
        """Whether the reuse cache is off, as hooks and stable offsets depend on each allocation.

        With the cache, the time of a garbage collection decides which memory a tensor gets.
        """
        return not REUSES_CAPSULES or bool(self.hooks.all) or self.store.origin is not None

    def check_usable(self) -> None:
        """Raise if the pool cannot allocate, or if the debug mode has found a problem."""
        if self.is_closed:
            raise RuntimeError(f"{self.name} was closed")
        self.check_process()
        if self.debugger is not None:
            self.raise_corruption()

    def check_process(self) -> None:
        """Raise in a fork of the process that made the pool."""
        if self._process != os.getpid():
            raise RuntimeError(
                f"{self.name} belongs to process {self._process}, of which this one is a fork; "
                "start processes with the 'spawn' method"
            )

    def raise_corruption(self) -> None:
        """Raise the findings of the debug mode, as a deleter cannot raise them."""
        if self.debugger is not None:
            self.update()  # checks what was released
            self.debugger.raise_found()

    def add_hook(self, hook: Hook) -> None:
        """Call a hook from now on; TypeError if it is none."""
        check_hook(hook)
        with self.lock, self.reentrancy as is_outermost:
            self.cache.by_dtype.clear()  # from now on no reuse bypasses the hooks
            if is_outermost:
                self.flush_cache()
            self.hooks.add(hook)

    def remove_hook(self, hook: Hook) -> None:
        """Undo the last addition of a hook."""
        with self.lock:
            self.hooks.remove(hook)

    # ------------------------------------------------------------------ allocation

    def acquire(self, nbytes: int, alignment: int = GRAIN, queue: Any = None) -> Allocation:
        """Allocate for a queue, the pool's own if None; 0 bytes take no memory.

        Raises:
            OutOfMemoryError: there is no room.
            RuntimeError: the pool was closed, or belongs to another process.
        """
        self.check_usable()
        pool = self.pool()
        if nbytes == 0:
            return Allocation(pool, 0, 0)
        hooks = self.hooks.all
        for hook in hooks:
            hook.before_allocate(pool, nbytes)
        heap = None if queue == self.store.source.driver.queue else queue
        allocation = self.retry(nbytes, lambda: self._take(pool, nbytes, alignment, heap))
        if hooks:
            try:
                self.hooks.allocated(pool, allocation, hooks)
            except BaseException:
                allocation.is_announced = False
                self.released.append(allocation)
                raise
        return allocation

    def retry(self, nbytes: int, take: Callable[[], _T]) -> _T:
        """The result of ``take``, retried after a collection and for as long as hooks free memory.

        Raises OutOfMemoryError in the end.
        """
        try:
            return take()
        except MemoryError:
            self.store.counters.retries += 1
            gc.collect()  # frees tensors in reference cycles, and allocations without an owner
            self.trim()
        while True:
            try:
                return take()
            except MemoryError as error:
                if not self.hooks.out_of_memory(self.pool(), nbytes):
                    self.store.counters.ooms += 1
                    raise self.out_of_memory_error(nbytes, str(error)) from None

    def _take(self, pool: Any, nbytes: int, alignment: int, queue: Any) -> Allocation:
        store = self.store
        with self.lock, self.reentrancy as is_outermost:
            if not is_outermost:
                return store.take_alone(pool, nbytes, alignment, queue)
            self.drain(everything=self.bypasses_cache)
            if self.debugger is not None:
                store.make_free(self.debugger.discharge(None))
            if queue is None:  # reserves are for the pool's own queue
                for reference in open_reserves.get():
                    reserve = reference()
                    if reserve is not None and reserve.core is self:
                        allocation = reserve.take(nbytes, alignment)
                        if allocation is not None:
                            return allocation
            if store.source.is_over_limit:
                store.source.check(0)
            is_all_seen = not self.exporter.is_large and not self.cache.count
            if not is_all_seen and not store.fits(nbytes, alignment, queue):
                self.drain()
                self.flush_cache()
            try:
                return store.take(pool, nbytes, alignment, queue)
            finally:
                self.report_segments()

    def out_of_memory_error(self, nbytes: int, reason: str) -> OutOfMemoryError:
        """The error for a request, with the pool's figures."""
        with self.lock:
            store = self.store
            return OutOfMemoryError(
                nbytes,
                pool=self.name,
                live=store.source.reserved - store.free_bytes,
                reserved=store.source.reserved,
                limit=store.source.limit,
                largest_free=store.largest_free,
                sites=largest_sites(list(store.in_use.values())),
                reason=reason,
            )

    # ------------------------------------------------------------------ release

    def drain(self, *, everything: bool = True) -> None:
        """Take back released memory, all or the part found quickly; in the outermost call."""
        if self._process != os.getpid():
            return
        for export in self.exporter.take_released(everything=everything):
            if not export.end():  # a consumer called its deleter twice
                if self.debugger is not None:
                    self.debugger.deleted_again(export.address)
                continue
            if self._cache(export):
                continue
            owner = self.exporter.reclaim(export)
            is_allocation = isinstance(owner, Allocation)
            if self.debugger is not None:
                self.debugger.ended(export.address, owner if is_allocation else owner.allocation)
            if is_allocation:
                self._take_back(owner)
            else:
                owner.views -= 1
            del owner  # the last reference to a Memory releases it, for the next loop to see
        while self.released:
            item = self.released.popleft()
            if isinstance(item, Allocation):
                self._take_back(item)
            else:
                item.give_back()
        self.store.take_back_finished()
        if self.is_closed:
            self.flush_cache()
            self.store.trim(0)
            self.report_segments()

    def _take_back(self, allocation: Allocation) -> None:
        if allocation.nbytes == 0:
            return
        if allocation.is_announced and self.hooks.all:
            self.hooks.released(self.pool(), allocation)
        for credit in allocation.charges:
            credit()
        self.store.take_back(allocation)

    def take_back_now(self, allocation: Allocation) -> None:
        """End an allocation at its owner's request."""
        self.released.append(allocation)
        self.update()
        self.raise_corruption()

    def update(self) -> Counters:
        """Take in what was released; returns the counters, which then include it."""
        with self.lock, self.reentrancy as is_outermost:
            if is_outermost:
                self.drain()
                for entry in self.cache:
                    self._count_reused(entry)
        return self.store.counters

    def trim(self, target: int = 0) -> None:
        """Return free segments to the driver until at most ``target`` bytes are reserved."""
        with self.lock, self.reentrancy as is_outermost:
            if not is_outermost:
                return
            self.drain()
            self.flush_cache()
            if self.debugger is not None:
                self.store.make_free(self.debugger.discharge(0))
            try:
                self.store.trim(target)
            finally:
                self.report_segments()

    def report_segments(self) -> None:
        """Report taken and returned segments to hooks; in the outermost call."""
        returned, taken = self.store.changed_segments()
        if self.hooks.all and (returned or taken):
            self.hooks.segments(self.pool(), returned, taken)

    # ------------------------------------------------------------------ the reuse cache

    def _cache(self, export: Export) -> bool:
        """Put a released tensor into the reuse cache, if that is allowed and possible."""
        allocation = export.owner
        if allocation.__class__ is not Allocation or allocation.queues:
            return False
        if not self.cache.has_room_for(export):
            return False
        self.store.cache(allocation)
        self.cache.put(export)
        return True

    def flush_cache(self) -> None:
        """Empty the reuse cache and free its blocks; in the outermost call."""
        for entry in self.cache.clear():
            self._count_reused(entry)
            while entry.cached:
                export = entry.cached.pop()
                self.store.free_cached(export.owner)
                self.exporter.reclaim(export)

    def _count_reused(self, entry: Entry) -> None:
        count, entry.reused = entry.reused, 0
        self.store.counters.reused(count, entry.size, entry.requested, entry.is_small)

    # ------------------------------------------------------------------ interrupts and lifetime

    def drain_if_idle(self, *, with_unclaimed: bool = False, wait: bool = False) -> None:
        """Drain, unless this or another thread is inside the pool.

        ``with_unclaimed`` also takes back allocations that an interrupt left without an owner.
        ``wait`` waits for another thread.
        """
        if self._process != os.getpid():
            return
        try:
            if self.lock.acquire(blocking=wait):
                with self.reentrancy as is_outermost:
                    if is_outermost:
                        self.drain()
                        for allocation in self.store.unclaimed() if with_unclaimed else ():
                            self._take_back(allocation)
        finally:
            # No Python code before the release: an interrupt there would leave the lock locked.
            try:  # noqa: SIM105 - suppress() runs Python code before the release
                self.lock.release()
            except RuntimeError:  # not acquired; after an interrupt nothing else tells
                pass

    def _recover(self) -> None:
        """Repair the records after an asynchronous exception, such as KeyboardInterrupt."""
        exported = {id(export.owner) for export in self.exporter.exports}
        self.store.recover(exported, () if self.debugger is None else self.debugger.quarantined())
        self.exporter.recover()

    def close(self) -> None:
        """Stop allocating, and return free memory to the driver, now and after later releases."""
        self.is_closed = self.store.is_closed = True  # before trim() empties the cache
        self.cache.by_dtype.clear()  # trim() does nothing within one of our own calls
        with self.lock, self.reentrancy as is_outermost:
            if is_outermost:
                self.drain()
                self.store.take_back_finished(wait=True)

    def abandon(self) -> None:
        """Stop in a forked process, where the driver is not running."""
        self.cache.by_dtype.clear()
        self.lock = threading.RLock()  # a thread of the parent may hold the other one
        self.reentrancy = ReentrancyGuard(self._recover)

    def __del__(self) -> None:
        # No memory is in use, or an allocation would have kept the pool alive; but queues may
        # still use what was released.
        exporter = getattr(self, "exporter", None)
        if exporter is not None and self._process == os.getpid():
            with contextlib.suppress(Exception):  # of a driver that was unloaded first, at exit
                if self.debugger is not None:
                    self.debugger.report(self)
                self.flush_cache()
                self.store.is_closed = True
                self.store.wait()
                self.store.trim(0)
            exporter.retire()
