"""The pool, as users see it."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from allocator.exchange.constructors import Constructors
from allocator.exchange.dtypes import as_dtype
from allocator.exchange.memory import Array, Memory
from allocator.exchange.tensors import TensorFactory
from allocator.monitoring import scopes
from allocator.monitoring.hooks import Hook
from allocator.monitoring.reports import Reports
from allocator.options.budget import Budget
from allocator.options.guard import Guard
from allocator.options.idle import Decay, checked_seconds
from allocator.options.reserve import Reservation
from allocator.options.stable import StableStore
from allocator.pool.allocation import Allocation
from allocator.pool.blocks import GRAIN, LARGEST_ALIGNMENT, Rules
from allocator.pool.core import Core
from allocator.pool.counters import Counters
from allocator.pool.driver import Driver, UsmDriver
from allocator.pool.sizes import (
    as_integer,
    as_nbytes,
    as_shape,
    as_strides,
    check_bool,
    checked_nbytes,
    contiguous_strides,
    extent,
    parse_size,
)
from allocator.pool.source import Source, limit_of
from allocator.pool.store import Store
from allocator.runtime.formatting import size_text
from allocator.runtime.queues import check_queue
from allocator.runtime.queues import queue as queue_of


class Pool(Constructors, Reports):
    """A caching memory pool of one SYCL device and USM kind.

    A request is rounded up to 512 bytes and gets the smallest free block that fits; if there is
    none, a new segment is taken from the driver. Once nothing refers to a tensor, its memory is
    free again from the pool's next call on.

    Args:
        device: a SYCL filter string such as "cpu" or "gpu", a ``torch.device`` of the CPU or an
            XPU, or a ``dpctl.SyclQueue``.
        kind: "device", "shared" or "host".
        name: name in messages and reports.
        limit: most bytes to take from the driver, as 4096 or "64MiB".
        fraction: the limit as a fraction of the device's memory.
        rules: constants of the allocation policy.
        driver: source of segments, instead of the device.
        stable_addresses: size of an arena that is allocated at once and serves all requests; the
            same calls then get the same offsets in every process. See :meth:`offset_of`.
        idle_seconds: time after which unused segments are returned to the driver, even if nobody
            calls the pool; never if None. With ``debug`` the segments of released memory that is
            still checked stay; :meth:`empty_cache` returns them.
        debug: detect writes outside of allocations and to released memory, at a cost of time and
            memory. See :meth:`check`.

    Raises:
        TypeError: an argument of another type.
        ValueError: an unknown kind, or an invalid limit or time.
        DeviceNotFoundError: no driver serves the device.
        OutOfMemoryError: the arena of ``stable_addresses`` cannot be allocated.
        RuntimeError: the device lacks this kind of memory, or ``debug`` cannot read it.

    Example:
        >>> import torch
        >>> pool = Pool("cpu")
        >>> x = pool.zeros((2, 3), torch.bfloat16)
        >>> x.shape, pool.memory_allocated()
        (torch.Size([2, 3]), 512)
        >>> del x
        >>> pool.memory_allocated()
        0
    """

    def __init__(
        self,
        device: Any = "cpu",
        kind: str = "device",
        *,
        name: str | None = None,
        limit: int | str | None = None,
        fraction: float | None = None,
        rules: Rules | None = None,
        driver: Driver | None = None,
        stable_addresses: int | str | None = None,
        idle_seconds: float | None = None,
        debug: bool = False,
    ) -> None:
        check_bool(debug, "debug")
        if rules is not None and not isinstance(rules, Rules):
            raise TypeError(f"rules={rules!r} is not an allocator.Rules")
        if idle_seconds is not None:
            idle_seconds = checked_seconds(idle_seconds)
            if stable_addresses is not None:
                raise ValueError(
                    f"idle_seconds={idle_seconds!r} and stable_addresses={stable_addresses!r} "
                    "exclude each other: the arena is never returned; leave one out"
                )
        if driver is None:
            driver = UsmDriver(queue_of(device), kind)
        self.driver = driver
        """source of segments."""
        self.kind = kind
        """kind of USM memory."""
        self.name = name or f"pool of {kind} memory of {driver.name}"
        """name in messages and reports."""
        self.is_host_accessible = driver.is_host_accessible
        """whether Python may read and write the memory."""
        self.dlpack_device = driver.dlpack_device
        """DLPack's device type and id."""
        self.sycl_queue = driver.queue
        """default ``dpctl.SyclQueue`` of allocations."""
        rules, source = rules or Rules(), Source(driver, limit_of(limit, fraction, driver.capacity))
        store = (
            Store(source, rules)
            if stable_addresses is None
            else StableStore(source, rules, stable_addresses, self.name)
        )
        self._core = core = Core(self, store, self.name, kind)
        self._tensors = TensorFactory(core)
        if debug:
            Guard.attach(core)
        self._decay = None if idle_seconds is None else Decay(core, idle_seconds)
        scopes.register(core)

    # ------------------------------------------------------------------ memory and arrays

    def allocate(self, nbytes: int, *, alignment: int = GRAIN, queue: Any = None) -> Memory:
        """Allocate bytes.

        Args:
            nbytes: number of bytes; 0 takes no block.
            alignment: alignment of the address, a power of two of at most 2 MiB.
            queue: ``dpctl.SyclQueue`` that will use the memory; the pool's own if None. Blocks of
                one queue are never allocated for another.

        Raises:
            TypeError: the size is not an integer, or the queue is not a queue.
            ValueError: the size is negative, or the alignment invalid.
            OutOfMemoryError: there is no room.
            RuntimeError: the pool was closed, or belongs to another process.
        """
        size, alignment = as_nbytes(nbytes), as_integer(alignment, "alignment")
        if queue is not None:
            check_queue(queue)
        if not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"alignment={alignment} is not a power of two of at most {LARGEST_ALIGNMENT}"
            )
        return Memory(self, self._core, self._core.acquire(size, max(alignment, GRAIN), queue))

    def array(self, shape: Any, dtype: Any = "float32", *, strides: Any = None) -> Array:
        """An uninitialized array, which torch, numpy, dpnp and dpctl read without a copy.

        Args:
            shape: an integer or a sequence of integers.
            dtype: a dtype of torch or numpy, or its name.
            strides: strides in elements; contiguous by default.

        Raises:
            TypeError: an element of the shape is not an integer, or the dtype is unknown.
            ValueError: a negative dimension, or elements that would share memory.
            OutOfMemoryError: there is no room.
            RuntimeError: the pool was closed, or belongs to another process.
        """
        sizes, kind = as_shape(shape), as_dtype(dtype)
        steps = contiguous_strides(sizes) if strides is None else as_strides(strides, sizes)
        nbytes = checked_nbytes(extent(sizes, steps) * kind.itemsize, sizes)
        return self.allocate(nbytes).array(sizes, kind, strides=steps)

    def record_queue(self, memory: Any, queue: Any) -> None:
        """Keep memory from being reused, once released, until ``queue`` has finished its work.

        Args:
            memory: a tensor of this pool, an array or :class:`Memory`.
            queue: a ``dpctl.SyclQueue`` that uses the memory.

        Raises:
            TypeError: ``memory`` is not memory, or ``queue`` is not a queue.
            ValueError: the memory is not of this pool.
        """
        allocation = _allocation_of(self, self._core, memory)
        if queue == self.sycl_queue and allocation.stream == 0:
            return
        check_queue(queue)
        if allocation.nbytes and queue not in allocation.queues:
            allocation.queues.append(queue)
            self._core.exporter.stop_reuse(allocation)

    # ------------------------------------------------------------------ limits and waste

    @property
    def limit(self) -> int | None:
        """Most bytes to take from the driver, or None."""
        return self._core.store.source.limit

    def set_limit(self, limit: int | str | None = None, *, fraction: float | None = None) -> None:
        """Set the most bytes to take from the driver; without arguments, remove the limit.

        A limit below what is in use is accepted: allocations fail until enough was released.

        Args:
            limit: bytes, as 4096 or "64MiB".
            fraction: the limit as a fraction of the device's memory, above 0 and at most 1.

        Raises:
            ValueError: both are given, the limit is negative, or the fraction not in (0, 1]; or
                the pool has ``stable_addresses``, which are its limit.
        """
        core = self._core
        core.check_process()
        allowed = limit_of(limit, fraction, self.driver.capacity)
        if allowed is not None and core.store.origin is not None:
            raise ValueError(
                f"{self.name} allocated its whole arena at the start; make another pool, with "
                "stable_addresses of another size"
            )
        source = core.store.source
        source.limit = allowed
        if allowed is not None and source.is_over_limit:
            core.trim(allowed)

    def trim(self, target: int | str = 0) -> int:
        """Return free segments to the driver until the pool holds at most ``target`` bytes.

        Args:
            target: bytes, as 4096 or "64MiB"; memory in use always stays.

        Returns:
            the bytes returned.

        Raises:
            RuntimeError: the pool belongs to another process.
        """
        goal = parse_size(target, "target")
        core = self._core
        core.check_process()
        before = core.store.source.reserved
        core.trim(goal)
        core.raise_corruption()
        return max(before - core.store.source.reserved, 0)

    def empty_cache(self) -> None:
        """Return all free segments to the driver."""
        self.trim(0)

    def budget(
        self,
        limit: int | str,
        name: str | None = None,
        on_exceed: Callable[[Budget, int], bool] | None = None,
    ) -> Budget:
        """Limit the bytes that allocations of a ``with`` block hold at once; see :class:`Budget`.

        An allocation that would pass the limit raises OutOfMemoryError.

        Args:
            limit: bytes, as 4096 or "64MiB".
            name: name in messages.
            on_exceed: function called with the budget and the bytes asked for if they do not fit;
                it may free something and return True to retry.

        Raises:
            TypeError: ``limit`` is not a size, or ``on_exceed`` not a function.
            ValueError: ``limit`` is negative or not a size.
        """
        return Budget(self._core, limit, name, on_exceed)

    def reserve(self, nbytes: int | str) -> Reservation:
        """Put memory aside for the allocations of a ``with`` block; see :class:`Reservation`.

        Allocations up to that size in total, each rounded up to 512 bytes, cannot fail: the block
        raises OutOfMemoryError at its start or not at all. Beyond that size the pool allocates as
        usual. With ``debug=True`` each allocation also takes its redzones from the reservation.

        Args:
            nbytes: bytes, as 4096 or "64MiB".
        """
        return Reservation(self, self._core, nbytes)

    def offset_of(self, memory: Any) -> int:
        """Offset of memory from the start of the arena, in bytes.

        Args:
            memory: a tensor of this pool, an array or :class:`Memory`.

        Raises:
            ValueError: the pool has no ``stable_addresses``, or the memory is not of this pool.

        Example:
            >>> pool = Pool("cpu", stable_addresses="4MiB")
            >>> x, y = pool.empty(1000), pool.empty(1000)
            >>> pool.offset_of(x), pool.offset_of(y)
            (0, 4096)
        """
        origin = self._core.store.origin
        if origin is None:
            raise ValueError(
                f"{self.name} has no stable addresses; make it with Pool(stable_addresses=...)"
            )
        allocation = _allocation_of(self, self._core, memory)
        if allocation.nbytes == 0:
            raise ValueError(f"{memory!r} has no bytes, and so no offset")
        return allocation.address - origin

    def check(self) -> None:
        """Look for writes outside of allocations and to released memory.

        Each problem is raised once, here or by another call, such as :meth:`empty`.

        Raises:
            MemoryCorruptionError: something wrote outside of its memory, or released it twice.
            RuntimeError: the pool was not made with ``debug=True``.

        Example:
            >>> import ctypes
            >>> pool = Pool("cpu", debug=True)
            >>> x = pool.empty(1000)
            >>> pool.check()
            >>> _ = ctypes.memset(x.data_ptr() + 4000, 0, 1)
            >>> pool.check()
            Traceback (most recent call last):
            ...
            allocator.options.guard.MemoryCorruptionError: overflow after the 3.9 KiB at ...
        """
        debugger = self._core.debugger
        if debugger is None:
            raise RuntimeError(
                f"{self.name} has nothing to check; make it with Pool(debug=True), or leave "
                "check() out"
            )
        self._core.check_process()
        debugger.check(self._core)
        debugger.raise_found()

    # ------------------------------------------------------------------ monitoring

    @contextlib.contextmanager
    def hook(self, hook: Hook) -> Iterator[Hook]:
        """Call a hook in the ``with`` block.

        Args:
            hook: a :class:`Hook`, or another object with its methods.

        Raises:
            TypeError: ``hook`` lacks one of them.
        """
        self.add_hook(hook)
        try:
            yield hook
        finally:
            self.remove_hook(hook)

    def add_hook(self, hook: Hook) -> None:
        """Call a hook from now on.

        Args:
            hook: a :class:`Hook`, or another object with its methods.

        Raises:
            TypeError: ``hook`` lacks one of them.
        """
        self._core.add_hook(hook)

    def remove_hook(self, hook: Hook) -> None:
        """Stop calling a hook; if it was added more than once, undo the last addition.

        Args:
            hook: a hook; one that was never added changes nothing.
        """
        self._core.remove_hook(hook)

    def tally(self) -> Counters:
        """The pool's counters, after taking in what was released."""
        return self._core.update()

    @property
    def is_usable(self) -> bool:
        """Whether it can allocate: it is not closed, and belongs to this process."""
        return not self._core.is_closed and self._core.is_in_own_process

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can be neither copied nor pickled; make another, or use named_pool()"
        )

    def __repr__(self) -> str:
        reserved = self._core.store.source.reserved
        state = "closed" if self._core.is_closed else size_text(reserved) + " reserved"
        return f"<{self.name}: {state}>"

    # ------------------------------------------------------------------ lifetime

    def close(self, *, force: bool = False) -> None:
        """Return all memory to the driver; the pool allocates nothing more.

        Waits for queues that still use released memory.

        Args:
            force: close even if memory is in use; such memory stays valid until it is released.

        Raises:
            RuntimeError: memory is in use, and ``force`` is False.
            TypeError: ``force`` is not a bool.
        """
        check_bool(force, "force")
        core = self._core
        core.check_process()
        core.drain_if_idle(with_unclaimed=True, wait=True)
        live = sorted(core.store.in_use.values(), key=lambda a: -a.nbytes)
        if live and not force:
            listed = ", ".join(f"{size_text(a.nbytes)} at {a.address:#x}" for a in live[:5])
            raise RuntimeError(
                f"{self.name} has {len(live)} allocations in use ({listed}); drop them first, or "
                "close(force=True)"
            )
        if core.store.holders and not force:
            raise RuntimeError(
                f"{self.name} has open reservations; leave their blocks first, or close(force=True)"
            )
        core.close()
        if self._decay is not None:
            self._decay.stop()
        self.trim(0)

    def __enter__(self) -> Pool:
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *error: object) -> None:
        pools = list(_entered.get())
        for i in reversed(range(len(pools))):  # a generator's block may end after another's began
            if pools[i] is self:
                del pools[i]
                break
        _entered.set(tuple(pools))


def _allocation_of(pool: Pool, core: Core, memory: Any) -> Allocation:
    """The allocation of a tensor, an array or memory of a pool; TypeError or ValueError if none."""
    if isinstance(memory, Array):
        memory = memory.memory
    if isinstance(memory, Memory):
        allocation = memory.allocation
        if allocation is None:
            raise ValueError(f"{memory!r} was released")
    else:
        if not hasattr(memory, "untyped_storage"):
            raise TypeError(f"{type(memory).__name__} is not a tensor, array or Memory")
        storage = memory.untyped_storage()
        if storage.nbytes() == 0:
            return Allocation(pool, 0, 0)  # whose pool it is of, nothing tells
        allocation = core.store.at(storage.data_ptr())
    if allocation is None or allocation.pool is not pool:
        raise ValueError(f"the memory does not belong to {pool.name}")
    return allocation


_entered: contextvars.ContextVar[tuple[Pool, ...]] = contextvars.ContextVar("entered", default=())


def entered_pools() -> tuple[Pool, ...]:
    """The pools whose ``with`` blocks are open here, the innermost last."""
    return _entered.get()
