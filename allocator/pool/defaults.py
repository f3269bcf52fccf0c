"""Shared pools: the default one of each queue and kind, and named ones."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from allocator.exchange.memory import copy_into
from allocator.pool.pool import Pool, entered_pools
from allocator.runtime.fork import renew_lock_in_child
from allocator.runtime.queues import queue as queue_of

if TYPE_CHECKING:
    import torch

_lock = threading.RLock()  # a finalizer or signal handler may ask in the middle of a call
renew_lock_in_child(globals())
_defaults: dict[tuple[Any, str], Pool] = {}
_named: dict[str, Pool] = {}


def default_pool(device: Any = "cpu", kind: str = "device") -> Pool:
    """The shared pool of a device, the same object at every call.

    Args:
        device: a SYCL filter string such as "cpu" or "gpu", a ``torch.device`` of the CPU or an
            XPU, or a ``dpctl.SyclQueue``.
        kind: "device", "shared" or "host".

    Raises:
        DeviceNotFoundError: no driver serves the device.

    Example:
        >>> default_pool("cpu") is default_pool()
        True
    """
    queue = queue_of(device)
    pool = _defaults.get((queue, kind))
    if pool is not None and pool.is_usable:
        return pool
    with _lock:
        new = Pool(queue, kind)  # a finalizer may ask for the same pool meanwhile
        pool = _defaults.get((queue, kind))
        if pool is None or not pool.is_usable:
            pool = _defaults[queue, kind] = new
        return pool


def named_pool(name: str, device: Any = "cpu", kind: str = "device", **options: Any) -> Pool:
    """The pool of this name; the first call makes it with the other arguments.

    Args:
        name: name of the pool, also in reports.
        device: a SYCL filter string such as "cpu" or "gpu", a ``torch.device`` of the CPU or an
            XPU, or a ``dpctl.SyclQueue``.
        kind: "device", "shared" or "host".
        options: further arguments of :class:`Pool`.

    Raises:
        ValueError: it exists with another device or kind, or options are given again.

    Example:
        >>> named_pool("activations") is named_pool("activations")
        True
    """
    queue = queue_of(device)
    with _lock:
        pool = _named.get(name)
        if pool is None or not pool.is_usable:
            new = Pool(queue, kind, name=name, **options)
            pool = _named.get(name)  # a finalizer may have made it meanwhile
            if pool is None or not pool.is_usable:
                pool = _named[name] = new
        elif pool.sycl_queue != queue or pool.kind != kind or options:
            raise ValueError(
                f"the pool {name!r} already exists, with {pool.kind} memory of {pool.driver.name}; "
                "ask for it with the same device and kind, and without options, or use another name"
            )
        return pool


def current_pool(device: Any = "cpu") -> Pool:
    """The pool of the innermost ``with pool:`` of this device, else the default one.

    Args:
        device: a SYCL filter string such as "cpu" or "gpu", a ``torch.device`` of the CPU or an
            XPU, or a ``dpctl.SyclQueue``.

    Example:
        >>> with named_pool("activations") as pool:
        ...     current_pool() is pool
        True
    """
    queue = queue_of(device)
    for pool in reversed(entered_pools()):
        if pool.sycl_queue == queue:
            return pool
    return default_pool(queue)


def empty(shape: Any, dtype: torch.dtype | None = None, device: Any = "cpu") -> torch.Tensor:
    """An uninitialized torch tensor of the current pool; see :meth:`Pool.empty`.

    Args:
        shape: an integer or a sequence of integers.
        dtype: torch's default dtype if None.
        device: the device, as :func:`current_pool` takes it.

    Example:
        >>> empty((2, 3)).shape
        torch.Size([2, 3])
    """
    return current_pool(device).empty(shape, dtype)


def zeros(shape: Any, dtype: torch.dtype | None = None, device: Any = "cpu") -> torch.Tensor:
    """A torch tensor of zeros of the current pool; see :meth:`Pool.zeros`.

    Args:
        shape: an integer or a sequence of integers.
        dtype: torch's default dtype if None.
        device: the device, as :func:`current_pool` takes it.

    Example:
        >>> zeros(3)
        tensor([0., 0., 0.])
    """
    return current_pool(device).zeros(shape, dtype)


def full(
    shape: Any, value: Any, dtype: torch.dtype | None = None, device: Any = "cpu"
) -> torch.Tensor:
    """A torch tensor of the current pool, filled with one value; see :meth:`Pool.full`.

    Args:
        shape: an integer or a sequence of integers.
        value: a number.
        dtype: if None, that of ``torch.full`` for ``value``.
        device: the device, as :func:`current_pool` takes it.

    Example:
        >>> full(3, 7)
        tensor([7, 7, 7])
    """
    return current_pool(device).full(shape, value, dtype)


copy_into(default_pool)
