"""Memory that other libraries lend through DLPack."""

from __future__ import annotations

import threading
from typing import Any

from allocator.exchange.buffers import Buffered, bytes_of
from allocator.exchange.devices import KDL_ONEAPI, TAKEN, is_host_accessible
from allocator.exchange.dlpack import VERSION, Imported, View
from allocator.exchange.exports import Exporter
from allocator.exchange.memory import Array
from allocator.pool.lifecycle import after_collections
from allocator.pool.sizes import contiguous_strides, extent

exporter = Exporter()
"""exports of other libraries' memory."""
_sweeping = threading.Lock()


def _sweep() -> None:
    """Return borrowed memory whose readers are done."""
    # Without waiting: one sweep is enough, and a forked process may find the lock held.
    if _sweeping.acquire(blocking=False):
        try:
            exporter.sweep()
        finally:
            _sweeping.release()


after_collections(_sweep)


class Borrowed:
    """Another library's memory, kept alive while an array reads it."""

    __slots__ = ("_tensor", "address", "is_read_only", "nbytes", "views")

    def __init__(self, tensor: Imported, nbytes: int) -> None:
        self.views = 0
        self._tensor = tensor
        self.address = tensor.address
        self.nbytes = nbytes
        self.is_read_only = tensor.is_read_only
        if is_host_accessible(tensor.device):
            self.__class__ = _HostBorrowed

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and id."""
        return self._tensor.device

    def capsule(self, view: View, versioned: bool, flags: int) -> Any:
        """A capsule that describes a view of this memory."""
        _sweep()
        return exporter.public_capsule(
            exporter.export(view, versioned=versioned, flags=flags), self
        )

    @property
    def readable_bytes(self) -> int:
        """The number of bytes that a buffer may have."""
        return self.nbytes


class _HostBorrowed(Buffered, Borrowed):  # type: ignore[misc]  # a C type is Any to mypy
    """Borrowed memory that the host can read: host memory, or that of a CPU as a SYCL device."""

    __slots__ = ()

    _buffer = bytes_of


def from_dlpack(obj: Any) -> Array:
    """Another library's tensor as an array, without a copy.

    Args:
        obj: object with ``__dlpack__`` and ``__dlpack_device__``, on the host or a oneAPI device.

    Raises:
        TypeError: ``obj`` lacks these methods.
        BufferError: it is on another device, has an unsupported element type or negative strides,
            or is a torch tensor with the negative bit.
        ValueError: elements share memory.

    Example:
        >>> import numpy
        >>> from_dlpack(numpy.arange(3.0)).shape
        (3,)
    """
    if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
        raise TypeError(f"{type(obj).__name__} has no __dlpack__; pass a tensor or an array")
    is_negated = getattr(obj, "is_neg", None)  # of torch's tensors
    if is_negated is not None and is_negated():
        raise BufferError(
            "a tensor with torch's negative bit holds its elements with the opposite sign; pass "
            "tensor.resolve_neg()"
        )
    _sweep()
    kind, _ = obj.__dlpack_device__()
    if kind not in TAKEN:
        raise BufferError(f"a tensor on DLPack device {kind} is not on the host or a oneAPI device")
    if kind == KDL_ONEAPI and hasattr(obj, "sycl_queue"):
        obj.sycl_queue.wait()  # for pending writes
    try:
        capsule = obj.__dlpack__(max_version=VERSION)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = obj.__dlpack__()
    tensor = Imported(capsule)
    if tensor.device[0] != kind:
        raise BufferError(f"the capsule's device {tensor.device} differs from __dlpack_device__()")
    strides = contiguous_strides(tensor.shape) if tensor.strides is None else tensor.strides
    memory = Borrowed(tensor, extent(tensor.shape, strides) * tensor.dtype.itemsize)
    return Array(memory, tensor.shape, tensor.dtype, strides, 0)
