"""The pool: memory that is taken from the driver once and given out many times."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from allocator.exchange.dlpack import KDL_CPU, VERSIONED_NAME, View, is_valid
from allocator.exchange.dtypes import as_dtype
from allocator.exchange.exports import (
    GIVEN,
    NAME_ADDRESS,
    NOT_BACK,
    REUSES_CAPSULES,
    Export,
    Exporter,
)
from allocator.exchange.memory import Array, Memory
from allocator.exchange.reuse import Shelf, Shelves
from allocator.options.budget import Budget, credit
from allocator.options.guard import Guard, new_guard
from allocator.options.idle import Decay, checked_seconds
from allocator.options.reserve import Reservation, take_reserved
from allocator.options.stable import StableStore
from allocator.pool import lifecycle
from allocator.pool.allocation import Allocation, largest_sites
from allocator.pool.blocks import LARGEST_ALIGNMENT, Rules
from allocator.pool.errors import OutOfMemoryError, report
from allocator.pool.reentrancy import Section
from allocator.pool.sizes import (
    as_integer,
    as_nbytes,
    as_shape,
    as_strides,
    checked_nbytes,
    contiguous_strides,
    extent,
    parse_size,
    size_text,
)
from allocator.pool.source import Source
from allocator.pool.store import ROUNDING, Store
from allocator.runtime.driver import Driver, UsmDriver
from allocator.runtime.queues import queue as queue_of
from allocator.watching import scopes
from allocator.watching.hooks import Hook
from allocator.watching.reports import Reports
from allocator.watching.statistics import Tally

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_T = TypeVar("_T")
_NO_DTYPE = type(None)  # what the shelves know no tensor of


class Pool(Reports):
    """Memory of one SYCL device and USM kind, cached for the next tensor that needs it.

    A request is rounded up to 512 bytes and gets the smallest free block in which it fits; a new
    segment comes from the driver when none does. Memory of a tensor is free again when nothing
    refers to it, from the pool's next call on.

    Args:
        device: a SYCL filter string such as "cpu" or "gpu", or a ``dpctl.SyclQueue``.
        kind: "device", "shared" or "host".
        name: in messages and reports.
        limit: bytes that the driver may be asked for in all, as 4096 or "64MiB".
        fraction: of the device's memory, in place of ``limit``.
        rules: the policy's constants.
        driver: where segments come from, instead of the device.
        stable_addresses: bytes that are taken at once, and all that the pool ever gives; the same
            calls then find the same offsets in every process. See :meth:`offset_of`.
        idle_seconds: after which a segment that nothing needed goes back to the driver, also when
            nobody calls the pool; never if None.
        debug: looks for writes outside of allocations and into released ones, at a cost of time
            and memory. See :meth:`check`.

    Raises:
        ValueError: an unknown kind, or a limit or time that makes no sense.
        DeviceNotFoundError: no driver serves the device.
        OutOfMemoryError: ``stable_addresses`` cannot be had.
        RuntimeError: the device has no memory of this kind, or none that ``debug`` can look at.

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
        if idle_seconds is not None:
            idle_seconds = checked_seconds(idle_seconds)
            if stable_addresses is not None:
                raise ValueError(
                    f"idle_seconds={idle_seconds!r} and stable_addresses={stable_addresses!r} "
                    "exclude each other: the arena is kept; leave one out"
                )
        if driver is None:
            driver = UsmDriver(queue_of(device) if isinstance(device, str) else device, kind)
        self.driver = driver
        """where segments come from."""
        self.kind = kind
        """of USM memory."""
        self.name = name or f"pool of {kind} memory of {driver.name}"
        """in messages and reports."""
        self.is_host_accessible = driver.is_host_accessible
        """whether Python may read and write the memory."""
        self.dlpack_device = driver.dlpack_device
        """DLPack's device type and id."""
        self.sycl_queue = driver.queue
        """the ``dpctl.SyclQueue`` that memory is for unless another is named."""
        self._rules = rules or Rules()
        self._process = os.getpid()
        self._is_closed = False
        source = Source(driver, self._limit_of(limit, fraction))
        self._store = (
            Store(source, self._rules)
            if stable_addresses is None
            else StableStore(source, self._rules, stable_addresses, self.name)
        )
        self._lock = threading.RLock()
        self._section = Section(self._recover)
        self._guard: Guard | None = new_guard(self) if debug else None
        self._hooks: tuple[Hook, ...] = () if self._guard is None else (self._guard,)
        self._history = None
        self._exporter = Exporter.obtain()
        self._released: deque[Allocation | Reservation] = deque()
        """what is over besides exports; finalizers append to it."""
        self._shelves = Shelves()
        self._shelves_by_dtype = self._shelves.by_dtype
        self._default_dtype: Callable[[], Any] = _NO_DTYPE
        self._from_dlpack: Callable[[Any], Tensor] = _torch_not_loaded
        for pool in lifecycle.pools():
            pool._drain_if_idle()  # one that is only kept by tensors that are gone can go now
        lifecycle.watch(self)
        self._decay = None if idle_seconds is None else Decay(self, idle_seconds)
        scopes.watch(self)

    # ------------------------------------------------------------------ tensors

    def empty(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor over the pool's memory, with whatever values are there.

        Args:
            shape: an integer or a sequence of them.
            dtype: torch's default dtype if None.

        Raises:
            TypeError: a shape that is not of integers, or a dtype that DLPack lacks.
            ValueError: a negative dimension, or more elements than can be counted.
            OutOfMemoryError: there is no room.
            RuntimeError: the pool was closed, or belongs to another process.

        Example:
            >>> Pool("cpu").empty(1024).shape
            torch.Size([1024])
        """
        if shape.__class__ is not int and not _are_integers(shape):  # 1.0 and True equal 1
            return self._new_tensor(shape, dtype)
        kind = self._default_dtype() if dtype is None else dtype
        try:
            shelf = self._shelves_by_dtype[kind][shape]
        except (KeyError, TypeError):
            shelf = None  # what fails from here on is not because of this
        if shelf is None:
            return self._new_tensor(shape, kind)
        # The next tensor of a loop takes the place of the last one, untouched. There is no lock: no
        # other thread runs from here until the word says that the tensor is given (see _exports).
        export, is_taken = shelf.last, False
        words, first = export.words, export.first
        if words[first] in NOT_BACK:
            export = shelf.before_last
            words, first = export.words, export.first
        # In one line, as a debugger may let other threads run between two. They may have made
        # another tensor of it meanwhile.
        if words[first] not in NOT_BACK and export.shelf is shelf: words[first], is_taken = GIVEN, True  # noqa: E501, E701  # fmt: skip
        if not is_taken:
            return self._next_tensor(shelf, shape, kind)
        if export is not shelf.last:
            shelf.before_last, shelf.last = shelf.last, export
        export.capsule_name[0] = NAME_ADDRESS
        shelf.reused += 1
        try:
            return self._from_dlpack(export.capsule)
        except BaseException:
            self._drop_unclaimed(export)
            raise

    def zeros(self, shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor of zeros; see :meth:`empty`.

        Args:
            shape: an integer or a sequence of them.
            dtype: torch's default dtype if None.
        """
        return self.empty(shape, dtype).zero_()

    def full(self, shape: Any, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor whose elements are ``value``; see :meth:`empty`.

        The dtype is that of ``torch.full``: the default one for floats, int64 and bool for
        Python's integers and booleans.

        Args:
            shape: an integer or a sequence of them.
            value: a number.
            dtype: of the tensor.
        """
        if dtype is None:
            dtype = self._torch().full((), value).dtype
        return self.empty(shape, dtype).fill_(value)

    def empty_strided(self, shape: Any, strides: Any, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor with given strides; see :meth:`empty`.

        Args:
            shape: an integer or a sequence of them.
            strides: in elements, one for each dimension.
            dtype: torch's default dtype if None.

        Raises:
            ValueError: elements would share memory, or a stride is negative.
        """
        sizes = as_shape(shape)
        return self._strided_tensor(sizes, as_strides(strides, sizes), dtype)

    def empty_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor of the shape and, where it is dense, the layout of another.

        Args:
            tensor: the other, on any device.
            dtype: that of ``tensor`` if None.
        """
        like = self._torch().empty_like(tensor, device="meta")  # torch's own rule for the strides
        return self._strided_tensor(tuple(like.shape), like.stride(), dtype or tensor.dtype)

    def zeros_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A torch tensor of zeros of the shape and layout of another; see :meth:`empty_like`.

        Args:
            tensor: the other, on any device.
            dtype: that of ``tensor`` if None.
        """
        return self.empty_like(tensor, dtype).zero_()

    # ------------------------------------------------------------------ memory and arrays

    def allocate(self, nbytes: int, *, alignment: int = ROUNDING, queue: Any = None) -> Memory:
        """Bytes.

        Args:
            nbytes: how many; 0 takes no block.
            alignment: of the address, a power of two of at most 2 MiB.
            queue: that the memory is for: blocks of one queue are never given to another.

        Raises:
            TypeError: a size that is not an integer, or a queue that is none.
            ValueError: a negative size, or another alignment.
            OutOfMemoryError: there is no room.
            RuntimeError: the pool was closed, or belongs to another process.
        """
        size, alignment = as_nbytes(nbytes), as_integer(alignment, "alignment")
        if queue is not None:
            _check_queue(queue)
        if not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(
                f"alignment={alignment} is no power of two of at most {LARGEST_ALIGNMENT}"
            )
        return Memory(self, self._acquire(size, max(alignment, ROUNDING), queue))

    def array(self, shape: Any, dtype: Any = "float32", *, strides: Any = None) -> Array:
        """An array, which needs no torch: torch, numpy, dpnp and dpctl take it without a copy.

        Args:
            shape: an integer or a sequence of them.
            dtype: of torch or numpy, or a name.
            strides: in elements; contiguous by default.

        Raises:
            TypeError: a shape that is not of integers, or no dtype.
            ValueError: a negative dimension, or elements that would share memory.
            OutOfMemoryError: there is no room.
            RuntimeError: the pool was closed, or belongs to another process.
        """
        sizes, kind = as_shape(shape), as_dtype(dtype)
        steps = contiguous_strides(sizes) if strides is None else as_strides(strides, sizes)
        nbytes = checked_nbytes(extent(sizes, steps) * kind.itemsize, sizes)
        return self.allocate(nbytes).array(sizes, kind, strides=steps)

    def record_queue(self, memory: Any, queue: Any) -> None:
        """Have memory wait, when it is released, for what ``queue`` is doing with it by then.

        Args:
            memory: a tensor of this pool, an array or :class:`Memory`.
            queue: a ``dpctl.SyclQueue``.

        Raises:
            TypeError: it is no memory, or the queue is none.
            ValueError: the memory is not of this pool.
        """
        allocation = self._allocation_of(memory)
        if queue == self.sycl_queue:
            return
        _check_queue(queue)
        if queue not in allocation.queues:
            allocation.queues.append(queue)
            self._exporter.unshelve(allocation)

    # ------------------------------------------------------------------ limits and waste

    @property
    def limit(self) -> int | None:
        """Bytes that the driver may be asked for in all, or None."""
        return self._store.source.limit

    def set_limit(self, limit: int | str | None = None, *, fraction: float | None = None) -> None:
        """Allow so many bytes, or this fraction of the device's; no limit if both are None.

        A limit below what is in use is accepted: new allocations fail until enough was released.

        Args:
            limit: bytes, as 4096 or "64MiB".
            fraction: of the device's memory, above 0 and at most 1.

        Raises:
            ValueError: both are given, the limit is negative, or the fraction not in (0, 1]; or
                the pool has ``stable_addresses``, which are its limit.
        """
        self._check_process()
        allowed = self._limit_of(limit, fraction)
        if allowed is not None and isinstance(self._store, StableStore):
            raise ValueError(
                f"{self.name} has taken all that it will give; make another pool, with "
                "stable_addresses of another size"
            )
        self._store.source.limit = allowed
        if self._is_over_limit and allowed is not None:
            self._give_back_free(allowed)

    def trim(self, target: int | str = 0) -> int:
        """Give free segments back until the pool holds at most so much of the driver's memory.

        Args:
            target: bytes, as 4096 or "64MiB"; what is in use stays, whatever the target.

        Returns:
            the bytes given back.

        Raises:
            RuntimeError: the pool belongs to another process.
        """
        goal = parse_size(target, "target")
        self._check_process()
        before = self._store.source.reserved
        self._give_back_free(goal)
        self._raise_corruption()
        return max(before - self._store.source.reserved, 0)

    def empty_cache(self) -> None:
        """Give all free segments back."""
        self.trim(0)

    def budget(
        self,
        limit: int | str,
        name: str | None = None,
        on_exceed: Callable[[Budget, int], bool] | None = None,
    ) -> Budget:
        """Limit what the allocations of a ``with`` block hold at once; see :class:`Budget`.

        One that would pass the limit raises OutOfMemoryError.

        Args:
            limit: bytes, as 4096 or "64MiB".
            name: in messages.
            on_exceed: is called with the budget and the bytes asked for when they have no room; it
                may drop something and return True for another try, until they do.

        Raises:
            TypeError: ``limit`` is no size, or ``on_exceed`` no function.
            ValueError: ``limit`` is negative or cannot be read.
        """
        return Budget(self, limit, name, on_exceed)

    def reserve(self, nbytes: int | str) -> Reservation:
        """Put memory aside for the allocations of a ``with`` block; see :class:`Reservation`.

        Up to so many bytes in all, each rounded up to 512, cannot fail; the OutOfMemoryError, if
        any, comes at the start. What exceeds them is taken from the pool as ever. With
        ``debug=True`` each allocation takes its redzones too.

        Args:
            nbytes: as 4096 or "64MiB".
        """
        return Reservation(self, nbytes)

    def offset_of(self, memory: Any) -> int:
        """Bytes from the start of the arena to the first one of some memory.

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
        if not isinstance(self._store, StableStore):
            raise ValueError(
                f"{self.name} has no stable addresses; make it with Pool(stable_addresses=...)"
            )
        allocation = self._allocation_of(memory)
        if allocation.nbytes == 0:
            raise ValueError(f"{memory!r} has no bytes, and so no place")
        return self._store.offset_of(allocation.address)

    def check(self) -> None:
        """Look for writes outside of allocations and into released ones.

        Each problem is raised once, here or by another call, such as :meth:`empty`.

        Raises:
            MemoryCorruptionError: something wrote where it may not, or released memory twice.
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
            allocator.options.guard.MemoryCorruptionError: overflow after of 3.9 KiB at ...
        """
        if self._guard is None:
            raise RuntimeError(
                f"{self.name} has nothing to check; make it with Pool(debug=True), or leave "
                "check() out"
            )
        self._check_process()
        self._guard.check(self)
        self._guard.raise_found()

    # ------------------------------------------------------------------ watching

    @contextlib.contextmanager
    def hook(self, hook: Hook) -> Iterator[Hook]:
        """Tell a hook of what the pool does, in the ``with`` block.

        Args:
            hook: an object with the methods of :class:`Hook`.
        """
        self.add_hook(hook)
        try:
            yield hook
        finally:
            self.remove_hook(hook)

    def add_hook(self, hook: Hook) -> None:
        """Tell a hook of what the pool does from now on.

        Args:
            hook: an object with the methods of :class:`Hook`.
        """
        with self._lock, self._section as is_outermost:
            self._shelves_by_dtype.clear()  # tensors that come back are no longer given unseen
            if is_outermost:
                self._flush_shelves()
            self._hooks = (*self._hooks, hook)

    def remove_hook(self, hook: Hook) -> None:
        """Tell a hook no more.

        Args:
            hook: one that was added; another changes nothing.
        """
        with self._lock:
            self._hooks = tuple(h for h in self._hooks if h is not hook)

    def tally(self) -> Tally:
        """The pool's counters, with all that was released until now."""
        with self._lock, self._section as is_outermost:
            if is_outermost:
                self._drain()
                for shelf in self._shelves:
                    self._count_reused(shelf)
        return self._store.tally

    @property
    def is_usable(self) -> bool:
        """Whether it gives memory: it was not closed, and the process is its own."""
        return not self._is_closed and self._process == os.getpid()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} can be neither copied nor pickled; make another, or use named_pool()"
        )

    def __repr__(self) -> str:
        state = (
            "closed" if self._is_closed else size_text(self._store.source.reserved) + " reserved"
        )
        return f"<{self.name}: {state}>"

    # ------------------------------------------------------------------ lifetime

    def close(self, *, force: bool = False) -> None:
        """Give everything back; the pool gives nothing more.

        Args:
            force: close also while memory is in use, which stays until it dies.

        Raises:
            RuntimeError: something is still in use, and ``force`` is False.
        """
        self._check_process()
        self._drain_if_idle(with_unclaimed=True)
        live = sorted(self._store.in_use.values(), key=lambda a: -a.nbytes)
        if live and not force:
            listed = ", ".join(f"{size_text(a.nbytes)} at {a.address:#x}" for a in live[:5])
            raise RuntimeError(
                f"{self.name} has {len(live)} allocations in use ({listed}); drop them first, or "
                "close(force=True)"
            )
        if self._store.holders and not force:
            raise RuntimeError(
                f"{self.name} has open reservations; leave their blocks first, or close(force=True)"
            )
        self._is_closed = self._store.is_closed = True  # before trim() empties the shelves
        self._shelves_by_dtype.clear()  # by trim() only if this is not inside one of our own calls
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

    # ------------------------------------------------------------------ giving

    def _next_tensor(self, shelf: Shelf, shape: Any, dtype: torch.dtype) -> Tensor:
        """Where the last two tensors of this shape and dtype are in use."""
        export = shelf.again()
        if export is None:
            return self._new_tensor(shape, dtype)
        # As in empty(): in a function of its own, an interrupt could come before the first line.
        try:
            return self._from_dlpack(export.capsule)
        except BaseException:
            self._drop_unclaimed(export)
            raise

    def _new_tensor(self, shape: Any, dtype: torch.dtype | None) -> Tensor:
        """Where no tensor of this shape and dtype was released just now."""
        kind = self._torch().get_default_dtype() if dtype is None else dtype
        sizes = as_shape(shape)
        shelf = self._shelves.find(sizes, kind)
        if shelf is not None and shelf.ready:
            tensor = self._tensor_from(shelf)
            if tensor is not None:
                return tensor
        return self._strided_tensor(sizes, contiguous_strides(sizes), kind, is_shelved=True)

    def _strided_tensor(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype | None,
        *,
        is_shelved: bool = False,
    ) -> Tensor:
        torch = self._torch()
        dtype = torch.get_default_dtype() if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r} is no torch.dtype")
        kind = as_dtype(dtype)
        nbytes = checked_nbytes(extent(shape, strides) * kind.itemsize, shape)
        if nbytes == 0:
            self._check_usable()
            device = "cpu" if self.dlpack_device[0] == KDL_CPU else f"xpu:{self.dlpack_device[1]}"
            empty: Tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            return empty
        allocation = self._acquire(nbytes)
        view = View(allocation.address, shape, strides, kind, self.dlpack_device)
        export = self._exporter.export(view)
        if is_shelved and allocation.is_ordinary:
            self._look_out_for(export, shape, dtype, allocation)
        return self._lent(export, allocation)

    def _lent(self, export: Export, owner: Allocation) -> Tensor:
        """The tensor that an export describes, which keeps the owner."""
        export.full_capsule()
        try:
            export.give(owner)
            return self._from_dlpack(export.capsule)
        except BaseException:
            self._drop_unclaimed(export)
            raise

    def _drop_unclaimed(self, export: Export) -> None:
        """Take back what torch did not take; an interrupt may also come when it has."""
        if export.is_held and is_valid(export.capsule, VERSIONED_NAME):
            export.drop()

    def _public_capsule(self, memory: Memory, view: View, versioned: bool, flags: int) -> Any:
        self._drain_if_idle()
        export = self._exporter.export(view, versioned=versioned, flags=flags)
        memory._views += 1
        return self._exporter.public_capsule(export, memory)

    def _acquire(self, nbytes: int, alignment: int = ROUNDING, queue: Any = None) -> Allocation:
        """Memory of which hooks have been told."""
        self._check_usable()
        if nbytes == 0:
            return Allocation(self, 0, 0)
        hooks = self._hooks
        for hook in hooks:
            hook.before_allocate(self, nbytes)
        heap = None if queue == self.sycl_queue else queue
        allocation = self._insist(nbytes, lambda: self._take(nbytes, alignment, heap))
        for i, hook in enumerate(hooks):
            try:
                hook.allocated(self, allocation)
            except BaseException:
                for told in hooks[:i]:
                    _call(told, told.released, self, allocation)
                allocation.is_announced = False
                self._released.append(allocation)
                raise
        return allocation

    def _insist(self, nbytes: int, take: Callable[[], _T]) -> _T:
        """What ``take`` gives; if there is no room, what can be dropped is, for another try."""
        try:
            return take()
        except MemoryError:
            self._store.tally.retries += 1
            gc.collect()  # tensors in cycles of references; also takes back what nobody claimed
            self._give_back_free()
        while True:
            try:
                return take()
            except MemoryError as error:
                if not any(hook.out_of_memory(self, nbytes) for hook in self._hooks):
                    self._store.tally.ooms += 1
                    raise self._explained(nbytes, error) from None

    def _take(self, nbytes: int, alignment: int, queue: Any) -> Allocation:
        with self._lock, self._section as is_outermost:
            if not is_outermost:
                return self._store.take_alone(self, nbytes, alignment)
            self._drain(everything=self._is_watched)
            self._discharge()
            reserved = take_reserved(self, nbytes, alignment, queue)
            if reserved is not None:
                return reserved
            if self._is_over_limit:
                self._store.source.check(0)
            is_all_seen = not self._exporter.is_large and not self._shelves.held
            if not is_all_seen and not self._store.fits(nbytes, alignment, queue):
                self._drain()
                self._flush_shelves()
            try:
                return self._store.take(self, nbytes, alignment, queue)
            finally:
                self._tell_of_segments()

    # ------------------------------------------------------------------ taking back

    def _drain(self, *, everything: bool = True) -> None:
        """Take in what was released, all or what is quick to find; in the outermost section."""
        if self._process != os.getpid():
            return
        for export in self._exporter.come_back(everything=everything):
            if not export.end():  # a consumer called its deleter twice
                if self._guard is not None:
                    self._guard.ended_again(export.address)
                continue
            if self._put_on_shelf(export):
                continue
            owner = self._exporter.reclaim(export)
            if self._guard is not None:
                self._guard.ended(export.address, owner)
            if isinstance(owner, Allocation):
                self._take_back(owner)
            else:
                owner._views -= 1
            del owner  # the last reference to a Memory releases it, for the next loop to see
        while self._released:
            item = self._released.popleft()
            if isinstance(item, Allocation):
                self._take_back(item)
            else:
                item.give_back()
        self._store.take_back_finished()
        if self._is_closed:
            self._flush_shelves()
            self._store.trim(0)
            self._tell_of_segments()

    def _take_unclaimed_back(self) -> None:
        """Take back what never reached its caller."""
        for allocation in self._store.unclaimed():
            self._take_back(allocation)

    def _take_back(self, allocation: Allocation) -> None:
        if allocation.nbytes == 0:
            return
        if allocation.is_announced:
            for hook in self._hooks:
                _call(hook, hook.released, self, allocation)
        credit(allocation)
        self._store.take_back(allocation)

    def _release_memory(self, memory: Memory) -> None:
        """The rest of :meth:`Memory.release`."""
        self.tally()  # takes in what readers of the memory have let go of
        if memory._views:
            raise BufferError(
                f"{memory!r} cannot be released: {memory._views} tensors or views read it; "
                "drop them first"
            )
        allocation, memory._allocation = memory._allocation, None
        assert allocation is not None  # Memory.release has looked, and lets one in at a time
        memory.__class__ = Memory  # one without a buffer to give
        self._released.append(allocation)
        self.tally()
        self._raise_corruption()

    # ------------------------------------------------------------------ shelves

    @property
    def _is_watched(self) -> bool:
        """Whether each allocation must be seen, by a hook or for its place to depend on the calls.

        The time of a collection decides which tensor a shelf gives.
        """
        return not REUSES_CAPSULES or bool(self._hooks) or isinstance(self._store, StableStore)

    def _tensor_from(self, shelf: Shelf) -> Tensor | None:
        """One that stayed ready."""
        self._check_usable()
        with self._lock, self._section as is_outermost:
            if not is_outermost:
                return None
            self._drain()
            export = self._shelves.take(shelf)
            if export is None:
                return None
            allocation, export.owner = export.owner, None  # so that it is missed if we fail
            self._store.unshelve(self, allocation)
            shelf.gave(export)
        return self._lent(export, allocation)

    def _look_out_for(
        self, export: Export, shape: tuple[int, ...], dtype: Any, allocation: Allocation
    ) -> None:
        """Have the export given again, when it comes back, to who asks for such a tensor."""
        with self._lock, self._section as is_outermost:
            if self._is_closed or self._is_watched or self._is_over_limit:
                return  # from now on all must be seen; looked at here, as another thread may hook
            if is_outermost and self._shelves.is_full:
                self._flush_shelves()
            self._shelves.shelf(shape, dtype, allocation).gave(export)

    def _put_on_shelf(self, export: Export) -> bool:
        allocation = export.owner
        if allocation.__class__ is not Allocation or allocation.queues:
            return False
        if not self._shelves.has_place_for(export):
            return False
        self._store.shelve(allocation)
        self._shelves.put(export)
        return True

    def _flush_shelves(self) -> None:
        """Make what the shelves hold free, and forget them."""
        for shelf in self._shelves.clear():
            self._count_reused(shelf)
            while shelf.ready:
                export = shelf.ready.pop()
                self._store.free_shelved(export.owner)
                self._exporter.reclaim(export)

    def _count_reused(self, shelf: Shelf) -> None:
        count, shelf.reused = shelf.reused, 0
        self._store.tally.reused(count, shelf.size, shelf.requested, shelf.is_small)

    # ------------------------------------------------------------------ the rest

    def _torch(self) -> Any:
        """The module torch, asked for late: this package is usable without it."""
        import torch

        if self._from_dlpack is _torch_not_loaded:
            on_gpu = self.dlpack_device[0] != KDL_CPU
            if on_gpu and not torch.xpu._is_compiled():
                raise RuntimeError(
                    f"this torch has no support for XPU, so it has no tensors on {self.name}; "
                    "install torch's XPU build, or use array() with dpnp"
                )
            self._default_dtype = torch.get_default_dtype
            self._from_dlpack = torch._C._from_dlpack
        return torch

    def _check_usable(self) -> None:
        if self._is_closed:
            raise RuntimeError(f"{self.name} was closed")
        self._check_process()
        self._raise_corruption()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError(
                f"{self.name} belongs to process {self._process}, of which this one is a fork; "
                "start processes with the 'spawn' method"
            )

    def _raise_corruption(self) -> None:
        """Raise what the debug mode has found, for which a deleter is no place."""
        if self._guard is not None:
            self.tally()  # looks at what was released
            self._guard.raise_found()

    def _give_back_free(self, target: int = 0) -> None:
        """Trim the pool, whichever queue the memory was for."""
        with self._lock, self._section as is_outermost:
            if not is_outermost:
                return
            self._drain()
            self._flush_shelves()
            self._discharge(0)
            try:
                self._store.trim(target)
            finally:
                self._tell_of_segments()

    @property
    def _is_over_limit(self) -> bool:
        limit = self._store.source.limit
        return limit is not None and self._store.source.reserved > limit

    def _discharge(self, most: int | None = None) -> None:
        """Make free what leaves the debug mode's quarantine, until it has at most so many bytes."""
        if self._guard is not None:
            self._store.make_free(self._guard.discharge(most))

    def _limit_of(self, limit: int | str | None, fraction: float | None) -> int | None:
        if limit is not None and fraction is not None:
            raise ValueError(f"limit={limit!r} and fraction={fraction!r} exclude each other")
        if fraction is not None:
            if not isinstance(fraction, float | int) or isinstance(fraction, bool):
                raise TypeError(f"fraction={fraction!r} is no number")
            if not 0 < fraction <= 1:
                raise ValueError(f"fraction={fraction!r} is not in (0, 1]")
            return int(fraction * self.driver.capacity)
        return None if limit is None else parse_size(limit, "limit")

    def _tell_of_segments(self) -> None:
        gone, come = self._store.changed_segments()
        for segment in gone:
            for hook in self._hooks:
                _call(hook, hook.shrunk, self, segment.address, segment.size)
        for segment in come:
            for hook in self._hooks:
                _call(hook, hook.grown, self, segment.address, segment.size)

    def _explained(self, nbytes: int, error: MemoryError) -> OutOfMemoryError:
        with self._lock:
            store = self._store
            return OutOfMemoryError(
                nbytes,
                pool=self.name,
                live=store.source.reserved - store.free_bytes,
                reserved=store.source.reserved,
                limit=self.limit,
                largest_free=store.largest_free,
                fragmentation=store.fragmentation,
                sites=largest_sites(list(store.in_use.values())),
                reason=str(error),
            )

    def _allocation_of(self, memory: Any) -> Allocation:
        if isinstance(memory, Array):
            memory = memory.memory
        if isinstance(memory, Memory):
            allocation = memory._allocation
            if allocation is None:
                raise ValueError(f"{memory!r} was released")
        else:
            storage = getattr(memory, "untyped_storage", None)
            if storage is None:
                raise TypeError(f"{type(memory).__name__} is no tensor, array or Memory")
            allocation = self._store.at(storage().data_ptr())
        if allocation is None or allocation.pool is not self:
            raise ValueError(f"the memory is not of {self.name}")
        return allocation

    def _recover(self) -> None:
        """Mend what an exception from outside left, such as KeyboardInterrupt."""
        kept = {id(export.owner) for export in self._exporter.exports}
        self._store.recover(kept, () if self._guard is None else self._guard.recover())
        self._exporter.recover()

    def _drain_if_idle(self, *, with_unclaimed: bool = False) -> None:
        """Drain unless someone is inside, in this thread or another."""
        if self._process != os.getpid():
            return
        try:
            if self._lock.acquire(blocking=False):
                with self._section as is_outermost:
                    if is_outermost:
                        self._drain()
                        if with_unclaimed:
                            self._take_unclaimed_back()
        finally:
            # Nothing in Python before the release: an interrupt there would leave the lock locked.
            try:  # noqa: SIM105 - suppress() runs Python before the release
                self._lock.release()
            except RuntimeError:  # not acquired; an interrupt knows no better
                pass

    def _abandon(self) -> None:
        """In a fork: give and take no more."""
        self._shelves_by_dtype.clear()
        self._lock = threading.RLock()  # a thread of the parent may hold the other for ever
        self._section = Section(self._recover)

    def __del__(self) -> None:
        # Nothing is out, or an allocation would have kept the pool.
        exporter = getattr(self, "_exporter", None)
        if exporter is not None and self._process == os.getpid():
            with contextlib.suppress(Exception):  # of a driver that went first, at exit
                if self._guard is not None:
                    self._guard.report(self)
                self._flush_shelves()
                self._store.is_closed = True
                self._store.trim(0)
            exporter.retire()


def _torch_not_loaded(capsule: Any) -> Tensor:
    raise AssertionError("no tensor can have been released before the first was made")


def _check_queue(queue: Any) -> None:
    if not hasattr(queue, "submit_barrier"):
        raise TypeError(f"queue={queue!r} is no dpctl.SyclQueue; allocator.queue() gives one")


def _are_integers(shape: Any) -> bool:
    """Whether ``shape`` is a tuple of Python's integers, no booleans or floats among them."""
    if shape.__class__ is not tuple:
        return False
    for n in shape:  # noqa: SIM110 - all() over a generator takes three times as long
        if n.__class__ is not int:
            return False
    return True


def _call(hook: Hook, method: Callable[..., None], *args: Any) -> None:
    """Call a hook's method, which cannot stop what has happened."""
    try:
        method(*args)
    except Exception as error:  # the user's code may raise anything
        report(error, "Exception ignored in a pool's hook", hook)


_entered: contextvars.ContextVar[tuple[Pool, ...]] = contextvars.ContextVar("entered", default=())


def entered_pools() -> tuple[Pool, ...]:
    """The pools whose ``with`` blocks are open here, innermost last."""
    return _entered.get()
