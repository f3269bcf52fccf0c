"""What a pool gives out besides torch tensors: memory, and arrays over it."""

from __future__ import annotations

import ctypes
import math
import operator
import threading
from typing import TYPE_CHECKING, Any

from allocator.exchange.buffers import Buffered, bytes_of
from allocator.exchange.dlpack import (
    IS_COPIED,
    KDL_CPU,
    KDL_ONEAPI,
    READ_ONLY,
    VERSION,
    Imported,
    View,
)
from allocator.exchange.dtypes import DType, as_dtype
from allocator.exchange.exports import Exporter
from allocator.pool.sizes import (
    as_integer,
    as_shape,
    as_strides,
    checked_nbytes,
    contiguous_strides,
    extent,
    size_text,
)
from allocator.runtime.libraries import load_dpctl

if TYPE_CHECKING:
    from allocator.pool.allocation import Allocation
    from allocator.pool.pool import Pool

_BYTE = as_dtype("uint8")


class Memory:
    """Bytes of a pool, its own until released or until nothing refers to them.

    torch, numpy, dpnp and dpctl take it without a copy: it has ``__dlpack__``,
    ``__sycl_usm_array_interface__`` and, where Python can read the memory, the buffer protocol.

    Made by :meth:`Pool.allocate`.

    Example:
        >>> from allocator import Pool
        >>> memory = Pool("cpu").allocate(4096)
        >>> memoryview(memory)[:5] = b"hello"
        >>> bytes(memoryview(memory)[:5])
        b'hello'
        >>> memory.release()
    """

    __slots__ = (
        "__weakref__",
        "_allocation",
        "_may_release",
        "_seen_by_sycl",
        "_views",
        "address",
        "nbytes",
        "pool",
    )
    is_read_only = False
    """never; :func:`from_dlpack` may lend memory that is."""

    def __init__(self, pool: Pool, allocation: Allocation) -> None:
        self.pool = pool
        """that gave it."""
        self.address = allocation.address
        """of the first byte."""
        self.nbytes = allocation.nbytes
        """bytes asked for."""
        self._allocation: Allocation | None = allocation
        # Counted up before, and down after, what is read: no calls are in between those steps, so
        # no other thread is either.
        self._views = 0
        self._may_release = True
        self._seen_by_sycl = False
        if pool.is_host_accessible:
            self.__class__ = _HostMemory

    def release(self) -> None:
        """Give the memory back now.

        Raises:
            ValueError: it was released before (a double free).
            BufferError: something still reads it, such as a tensor made from it, or may do so: a
                SYCL library that took it through ``__sycl_usm_array_interface__`` does not say
                when it is done.
        """
        may_release, self._may_release = self._may_release, False  # for one thread at a time
        if self._allocation is None or not may_release:
            raise ValueError(f"double free: the memory at {self.address:#x} was released before")
        try:
            if self._seen_by_sycl:
                raise BufferError(
                    f"{self!r} cannot be released: dpctl or dpnp may read it, through "
                    "__sycl_usm_array_interface__; drop all references to it instead"
                )
            self.pool._release_memory(self)
        finally:
            self._may_release = True

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._allocation is None

    def array(
        self, shape: Any, dtype: Any = "uint8", *, strides: Any = None, offset: int = 0
    ) -> Array:
        """An array over this memory, which it keeps.

        Args:
            shape: an integer or a sequence of them.
            dtype: of torch or numpy, or a name.
            strides: in elements; contiguous by default.
            offset: of the first element, in bytes.

        Raises:
            ValueError: it would reach past the end, start between two elements, or have elements
                that share memory.
            RuntimeError: the memory was released.
        """
        self._check()
        return Array(self, shape, dtype, strides, offset)

    def copy_to_host(self) -> bytes:
        """The bytes, once the pool's queue is done with what was asked of it."""
        self._check()
        return self.pool.driver.read(self.address, self.nbytes)

    def copy_from_host(self, data: Any) -> None:
        """Write bytes to the start of the memory.

        Args:
            data: an object with the buffer protocol.

        Raises:
            ValueError: there are more bytes than this memory holds.
        """
        self._check()
        flat = memoryview(data).cast("B")
        if flat.nbytes > self.nbytes:
            raise ValueError(f"data has {flat.nbytes} bytes, this memory {self.nbytes}")
        self.pool.driver.write(self.address, flat)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A capsule of the bytes; see :meth:`Array.__dlpack__`."""
        return self.array(self.nbytes).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and id."""
        return self.pool.dlpack_device

    @property
    def sycl_queue(self) -> Any:
        """The pool's."""
        return self.pool.sycl_queue

    @property
    def __sycl_usm_array_interface__(self) -> dict[str, Any]:
        """As dpctl and dpnp read it."""
        return self.array(self.nbytes).__sycl_usm_array_interface__

    if TYPE_CHECKING:  # of the class that memory which Python can read takes

        def __buffer__(self, flags: int) -> memoryview: ...

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        state = "released" if self._allocation is None else size_text(self.nbytes)
        return f"<Memory {state} at {self.address:#x} of {self.pool.name}>"

    def _check(self) -> None:
        if self._allocation is None:
            raise RuntimeError(f"the memory at {self.address:#x} was released")

    @property
    def _readable(self) -> int:
        """Bytes that a buffer may have: none if it was released while one was being made."""
        return 0 if self._allocation is None else self.nbytes

    def __reduce__(self) -> Any:
        # A copy would be a second owner of the same bytes.
        raise TypeError(f"{self!r} can be neither copied nor pickled; copy a tensor made from it")

    def __del__(self) -> None:
        # May run at any moment, inside a pool's own call too: hand it over, take no lock.
        allocation = getattr(self, "_allocation", None)
        if allocation is not None:
            self._allocation = None  # should someone keep this object all the same
            self.__class__ = Memory
            self.pool._released.append(allocation)


class _HostMemory(Buffered, Memory):  # type: ignore[misc]  # a C type is Any to mypy
    """Memory with the buffer protocol; while it is not released."""

    __slots__ = ()

    def _buffer(self) -> Any:
        return bytes_of(self)


_HostMemory.__name__ = _HostMemory.__qualname__ = "Memory"


class Array:
    """A shape and an element type over :class:`Memory`, or over another library's memory.

    It computes nothing: ``torch.from_dlpack``, ``numpy.from_dlpack`` and ``dpctl.tensor.asarray``
    take it without a copy, and ``dpnp.asarray`` what the last one gives; by itself that copies. It
    has the buffer protocol where Python can read the memory and numpy has such an element type.

    Made by :meth:`Pool.array`, :meth:`Memory.array` and :func:`from_dlpack`.
    """

    __slots__ = ("address", "dtype", "is_read_only", "memory", "shape", "strides")

    def __init__(
        self, memory: Memory | Borrowed, shape: Any, dtype: Any, strides: Any, offset: int
    ) -> None:
        offset = as_integer(offset, "offset")
        self.memory = memory
        """that it keeps."""
        self.dtype: DType = as_dtype(dtype)
        """the element type."""
        self.shape = as_shape(shape)
        """elements in each dimension."""
        self.strides = (
            contiguous_strides(self.shape) if strides is None else as_strides(strides, self.shape)
        )
        """elements from one to the next in each dimension."""
        self.address = memory.address + offset
        """of the first element."""
        self.is_read_only = isinstance(memory, Borrowed) and memory.is_read_only
        """whether its lender asks that nobody write to it."""
        itemsize = self.dtype.itemsize
        end = offset + checked_nbytes(extent(self.shape, self.strides) * itemsize, self.shape)
        if offset < 0 or offset % itemsize:
            raise ValueError(
                f"offset={offset} is not a multiple of {self.dtype.name}'s {itemsize} bytes"
            )
        if end > memory.nbytes:
            raise ValueError(
                f"an array of shape={self.shape} and dtype {self.dtype.name} from offset={offset} "
                f"ends at byte {end} of {memory.nbytes}"
            )
        if type(self) is Array and self.dtype.typestr is not None and isinstance(memory, Buffered):
            self.__class__ = _HostArray

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        return self.size < 2 or all(
            size == 1 or step == expected
            for size, step, expected in zip(
                self.shape, self.strides, contiguous_strides(self.shape)
            )
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and id."""
        return self.memory.__dlpack_device__()

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule for ``from_dlpack`` of another library.

        Args:
            stream: of the consumer: a ``dpctl.SyclQueue``, which will wait for the pool's; with
                None, as where the host reads the memory, this call waits.
            max_version: the newest that the consumer knows; a legacy capsule if None or below 1.
            dl_device: where the consumer wants it. Host memory of another device is a copy.
            copy: True makes one, False forbids it.

        Raises:
            BufferError: it cannot be had so.
            ValueError: ``max_version`` or ``dl_device`` is no pair.
        """
        versioned = _is_versioned(max_version)
        self._check()
        own = self.__dlpack_device__()
        target = own if dl_device is None else _pair(dl_device, "dl_device")
        if target[0] not in (own[0], KDL_CPU, KDL_ONEAPI):
            raise BufferError(f"dl_device={dl_device!r} cannot read memory of device {own}")
        as_usm = target[0] == KDL_ONEAPI and own[0] == KDL_CPU
        if target[0] == KDL_ONEAPI:
            self._check_default_context(target)
        as_host = target == (KDL_CPU, 0) and isinstance(self.memory, Buffered)
        moves = target != own and not as_usm and not as_host
        if moves and copy is False:
            raise BufferError(f"copy=False, but from device {own} to {target} is a copy")
        if self.is_read_only and not versioned and not copy and not moves:
            raise BufferError("a legacy capsule cannot say that the memory is read-only; copy=True")
        self._order(target, stream)
        if copy or moves:
            return self._copied(target)._capsule(target, versioned, IS_COPIED)
        return self._capsule(target, versioned, READ_ONLY if self.is_read_only else 0)

    @property
    def sycl_queue(self) -> Any:
        """The pool's.

        Raises:
            AttributeError: the memory is not SYCL's.
        """
        if not isinstance(self.memory, Memory):
            raise AttributeError("memory of another library has no sycl_queue")
        return self.memory.sycl_queue

    @property
    def __sycl_usm_array_interface__(self) -> dict[str, Any]:
        """As dpctl and dpnp read it.

        Raises:
            AttributeError: the memory is not SYCL's, or numpy has no such element type.
        """
        if not isinstance(self.memory, Memory):
            raise AttributeError("memory of another library has no __sycl_usm_array_interface__")
        if self.dtype.typestr is None:
            raise AttributeError(f"numpy has no {self.dtype.name} to name in an array interface")
        self.memory._seen_by_sycl = True
        self._check()
        return {
            "data": (self.address, self.is_read_only),
            "shape": self.shape,
            "strides": None if self.is_contiguous else self.strides,
            "typestr": self.dtype.typestr,
            "version": 1,
            "syclobj": self.memory.pool.sycl_queue,
            "offset": 0,
        }

    def __repr__(self) -> str:
        return f"<Array {self.dtype.name}{list(self.shape)} at {self.address:#x}>"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def _check(self) -> None:
        if isinstance(self.memory, Memory) and self.memory.is_released:
            raise BufferError(f"the memory at {self.memory.address:#x} was released")

    def _check_default_context(self, target: tuple[int, ...]) -> None:
        if not isinstance(self.memory, Memory):
            if target == self.__dlpack_device__():
                return
            raise BufferError(f"memory of another library cannot be given as device {target}")
        queue = self.memory.pool.sycl_queue
        if queue is None:
            raise BufferError(f"memory of no SYCL queue cannot be given as device {target}")
        device = queue.sycl_device
        if device.parent_device is not None:
            raise BufferError("memory of a sub-device cannot be given as a oneAPI device's")
        if queue.sycl_context != device.sycl_platform.default_context:
            raise BufferError(
                "memory of a context of your own cannot be given as a oneAPI device's"
            )
        if not self.address:
            raise BufferError("an empty array has no address, which a oneAPI device's needs")
        if target[1] != load_dpctl().get_devices().index(device):
            raise BufferError(f"dl_device={target} is not the device that the memory belongs to")

    def _order(self, target: tuple[int, ...], stream: Any) -> None:
        """Have the consumer see what the pool's queue was asked to write."""
        if target[0] == KDL_CPU and stream is not None:
            raise BufferError(f"stream={stream!r}: host memory has none; pass None")
        if not isinstance(self.memory, Memory):
            return
        queue = self.memory.pool.sycl_queue
        if stream is None:
            if queue is not None:
                queue.wait()
            return
        if not isinstance(stream, load_dpctl().SyclQueue):
            raise BufferError(f"stream={stream!r} is no dpctl.SyclQueue")
        if stream != queue:
            stream.submit_barrier([queue.submit_barrier()])

    def _copied(self, target: tuple[int, ...]) -> Array:
        """The same values, contiguous, in memory of the target."""
        from allocator.pool.defaults import default_pool

        source = self.memory
        if isinstance(source, Borrowed) and not isinstance(source, Buffered):
            raise BufferError("device memory of another library cannot be copied; ask its owner to")
        pool = source.pool if isinstance(source, Memory) else default_pool()
        if target[0] == KDL_CPU and not pool.is_host_accessible:
            pool = default_pool(pool.sycl_queue, "host")
        copy = pool.array(self.shape, self.dtype)
        if self.nbytes:
            pool.driver.write(copy.address, memoryview(self._contents()))
        return copy

    def _contents(self) -> bytes:
        """The elements in C order."""
        itemsize = self.dtype.itemsize
        nbytes = extent(self.shape, self.strides) * itemsize
        if isinstance(self.memory, Memory):
            data = self.memory.pool.driver.read(self.address, nbytes)
        else:
            data = ctypes.string_at(self.address, nbytes)
        if self.is_contiguous:
            return data
        import numpy as np

        steps = [step * itemsize for step in self.strides]
        return np.ndarray(self.shape, f"V{itemsize}", data, strides=steps).tobytes()

    def _buffer(self) -> Any:
        """What has the array's buffer, and keeps the memory."""
        import numpy as np

        self._check()
        itemsize = self.dtype.itemsize
        return np.ndarray(
            self.shape,
            self.dtype.typestr,
            bytes_of(self.memory),
            self.address - self.memory.address,
            [step * itemsize for step in self.strides],
        )

    def _capsule(self, device: tuple[int, ...], versioned: bool, flags: int) -> Any:
        view = View(self.address, self.shape, self.strides, self.dtype, (device[0], device[1]))
        if isinstance(self.memory, Memory):
            capsule = self.memory.pool._public_capsule(self.memory, view, versioned, flags)
            self._check()  # another thread may have released it before the capsule was counted
            return capsule
        _take_back_lent()
        export = _lent_on.export(view, versioned=versioned, flags=flags)
        return _lent_on.public_capsule(export, self.memory)


class _HostArray(Buffered, Array):  # type: ignore[misc]  # a C type is Any to mypy
    """An array with the buffer protocol."""

    __slots__ = ()


_HostArray.__name__ = _HostArray.__qualname__ = "Array"


def _is_versioned(max_version: Any) -> bool:
    if max_version is None:
        return False
    return _pair(max_version, "max_version")[0] >= 1


def _pair(value: Any, argument: str) -> tuple[int, int]:
    """``value`` as two integers; ValueError if it is not, as torch tries again on a TypeError."""
    try:
        first, second = value
        return operator.index(first), operator.index(second)
    except (TypeError, ValueError):
        raise ValueError(f"{argument}={value!r} is no pair such as (1, 0)") from None


_lent_on = Exporter()
"""Exports of memory that is another library's."""
_taking_back = threading.Lock()


def _take_back_lent() -> None:
    """Let go of what readers of other libraries' memory are done with."""
    # Whoever comes second need not wait; and a fork may find the lock held for ever.
    if _taking_back.acquire(blocking=False):
        try:
            _lent_on.sweep()
        finally:
            _taking_back.release()


class Borrowed:
    """Another library's memory, kept while an array reads it."""

    __slots__ = ("_tensor", "_views", "address", "is_read_only", "nbytes")

    def __init__(self, tensor: Imported, nbytes: int) -> None:
        self._views = 0
        self._tensor = tensor
        self.address = tensor.address
        self.nbytes = nbytes
        self.is_read_only = tensor.is_read_only
        kind, number = tensor.device
        if kind == KDL_CPU or any(d.is_cpu for d in load_dpctl().get_devices()[number:][:1]):
            self.__class__ = _HostBorrowed

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and id."""
        return self._tensor.device

    if TYPE_CHECKING:  # of the class that memory which Python can read takes

        def __buffer__(self, flags: int) -> memoryview: ...

    @property
    def _readable(self) -> int:
        return self.nbytes


class _HostBorrowed(Buffered, Borrowed):  # type: ignore[misc]  # a C type is Any to mypy
    """Memory that the host can read: its own, or a CPU's as a SYCL device."""

    __slots__ = ()

    def _buffer(self) -> Any:
        return bytes_of(self)


def from_dlpack(obj: Any) -> Array:
    """Another library's tensor as an array, without a copy.

    Args:
        obj: has ``__dlpack__`` and ``__dlpack_device__``; on the host or a oneAPI device.

    Raises:
        TypeError: it has not.
        BufferError: it is on another device, of an element type that we lack, or flipped.
        ValueError: elements share memory.

    Example:
        >>> import numpy
        >>> from_dlpack(numpy.arange(3.0)).shape
        (3,)
    """
    if not hasattr(obj, "__dlpack__") or not hasattr(obj, "__dlpack_device__"):
        raise TypeError(f"{type(obj).__name__} has no __dlpack__; pass a tensor or an array")
    _take_back_lent()
    kind, _ = obj.__dlpack_device__()
    if kind not in (KDL_CPU, KDL_ONEAPI):
        raise BufferError(f"a tensor on DLPack device {kind} is not on the host or a oneAPI device")
    if kind == KDL_ONEAPI and hasattr(obj, "sycl_queue"):
        obj.sycl_queue.wait()  # what it was asked to write is there
    try:
        capsule = obj.__dlpack__(max_version=VERSION)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = obj.__dlpack__()
    tensor = Imported(capsule)
    if tensor.device[0] != kind:
        raise BufferError(f"the capsule's device {tensor.device} is not __dlpack_device__()'s")
    strides = contiguous_strides(tensor.shape) if tensor.strides is None else tensor.strides
    memory = Borrowed(tensor, extent(tensor.shape, strides) * tensor.dtype.itemsize)
    return Array(memory, tensor.shape, tensor.dtype, strides, 0)
