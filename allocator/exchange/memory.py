"""Memory of a pool, and arrays over it, for libraries other than torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allocator.exchange.buffers import Buffered, Lender, Uncopyable, bytes_of
from allocator.exchange.devices import HOST, KDL_CPU, KDL_ONEAPI, TAKEN
from allocator.exchange.dlpack import IS_COPIED, READ_ONLY, View, as_pair
from allocator.exchange.dtypes import DType, as_dtype
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.driver import bytes_at
from allocator.pool.sizes import (
    as_integer,
    as_shape,
    as_strides,
    checked_nbytes,
    contiguous_strides,
    extent,
)
from allocator.runtime.formatting import size_text
from allocator.runtime.libraries import load_dpctl

_shared_pool: Callable[[Any, str], Any]


def copy_into(shared_pool: Callable[[Any, str], Any]) -> None:
    """Set the function that returns a shared pool, by queue or device and kind, for copies."""
    global _shared_pool
    _shared_pool = shared_pool


class Memory(Uncopyable):
    """Bytes of a pool, in use until they are released or nothing refers to them.

    torch, numpy, dpnp and dpctl read it without a copy: it has ``__dlpack__``,
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
        "_core",
        "_may_release",
        "_seen_by_sycl",
        "address",
        "allocation",
        "nbytes",
        "pool",
        "views",
    )
    is_read_only = False
    """always False; memory from :func:`from_dlpack` may be read-only."""

    def __init__(self, pool: Any, core: Core, allocation: Allocation) -> None:
        self.pool = pool
        """the :class:`Pool` that it belongs to."""
        self.address = allocation.address
        """address of the first byte."""
        self.nbytes = allocation.nbytes
        """bytes asked for."""
        self.allocation: Allocation | None = allocation
        """the pool's record, which hooks see; None once released."""
        # Raised before a reader begins and lowered after it ends; no call lies in between, so no
        # other thread runs there.
        self.views = 0
        """number of tensors and buffers that read it."""
        self._core = core
        self._may_release = True
        self._seen_by_sycl = False
        if pool.is_host_accessible:
            self.__class__ = _HostMemory

    def release(self) -> None:
        """Release the memory now.

        Raises:
            ValueError: it was released before (a double free).
            BufferError: something still reads it, such as a tensor made from it, or may do so: a
                SYCL library that took it through ``__sycl_usm_array_interface__`` does not tell
                when it is done.
        """
        may_release, self._may_release = self._may_release, False  # one thread at a time
        if self.allocation is None or not may_release:
            raise ValueError(f"double free: the memory at {self.address:#x} was released before")
        try:
            if self._seen_by_sycl:
                raise BufferError(
                    f"{self!r} cannot be released: dpctl or dpnp may read it, through "
                    "__sycl_usm_array_interface__; drop all references to it instead"
                )
            self._core.update()  # takes in what its readers have released
            if self.views:
                raise BufferError(
                    f"{self!r} cannot be released: {self.views} tensors or views read it; "
                    "drop them first"
                )
            allocation, self.allocation = self.allocation, None
            self.__class__ = Memory  # the class without a buffer
            self._core.take_back_now(allocation)
        finally:
            self._may_release = True

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self.allocation is None

    def array(
        self, shape: Any, dtype: Any = "uint8", *, strides: Any = None, offset: int = 0
    ) -> Array:
        """An array over this memory, which it keeps alive.

        Args:
            shape: an integer or a sequence of integers.
            dtype: a dtype of torch or numpy, or its name.
            strides: strides in elements; contiguous by default.
            offset: offset of the first element in bytes.

        Raises:
            ValueError: the array would reach past the end, start between two elements, or have
                elements that share memory.
            RuntimeError: the memory was released.
        """
        self._check()
        return Array(self, shape, dtype, strides, offset)

    def copy_to_host(self) -> bytes:
        """A copy of the bytes, after the pool's queue has finished its work."""
        self._check()
        data: bytes = self.pool.driver.read(self.address, self.nbytes)
        return data

    def copy_from_host(self, data: Any) -> None:
        """Write bytes to the start of the memory.

        Args:
            data: an object with the buffer protocol.

        Raises:
            ValueError: ``data`` has more bytes than this memory.
        """
        self._check()
        view = memoryview(data)
        if view.nbytes > self.nbytes:
            raise ValueError(f"data has {view.nbytes} bytes, this memory {self.nbytes}")
        if view.nbytes:  # else cast() refuses views of several dimensions
            self.pool.driver.write(self.address, view.cast("B"))

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A capsule of the bytes; see :meth:`Array.__dlpack__`."""
        return self.array(self.nbytes).__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's device type and id."""
        device: tuple[int, int] = self.pool.dlpack_device
        return device

    @property
    def sycl_queue(self) -> Any:
        """The pool's queue."""
        return self.pool.sycl_queue

    @property
    def __sycl_usm_array_interface__(self) -> dict[str, Any]:
        """The description of the memory that dpctl and dpnp read."""
        return self.array(self.nbytes).__sycl_usm_array_interface__

    if TYPE_CHECKING:  # defined by _HostMemory

        def __buffer__(self, flags: int) -> memoryview: ...

    def __len__(self) -> int:
        return self.nbytes

    def __repr__(self) -> str:
        state = "released" if self.allocation is None else size_text(self.nbytes)
        return f"<Memory {state} at {self.address:#x} of {self.pool.name}>"

    def _check(self) -> None:
        if self.allocation is None:
            raise RuntimeError(f"the memory at {self.address:#x} was released")

    @property
    def readable_bytes(self) -> int:
        """Bytes that a buffer may have: 0 if the memory was released while one was being made."""
        return 0 if self.allocation is None else self.nbytes

    def capsule(self, view: View, versioned: bool, flags: int) -> Any:
        """A DLPack capsule of a view of this memory, which it keeps alive.

        Args:
            view: what the consumer sees.
            versioned: whether the capsule has a version.
            flags: DLPack's flags.
        """
        self._core.drain_if_idle()
        exporter = self._core.exporter
        export = exporter.export(view, versioned=versioned, flags=flags)
        self.views += 1
        return exporter.public_capsule(export, self)

    def __del__(self) -> None:
        # May run at any moment, even inside the pool's own calls, so it takes no lock.
        allocation = getattr(self, "allocation", None)
        if allocation is not None:
            self.allocation = None  # in case something resurrects this object
            self.__class__ = Memory
            self._core.released.append(allocation)


class _HostMemory(Buffered, Memory):  # type: ignore[misc]  # a C type is Any to mypy
    """Memory with the buffer protocol, until it is released."""

    __slots__ = ()

    _buffer = bytes_of


_HostMemory.__name__ = _HostMemory.__qualname__ = "Memory"


class Array(Uncopyable):
    """A shape and an element type over :class:`Memory`, or over another library's memory.

    It has no arithmetic: ``torch.from_dlpack``, ``numpy.from_dlpack`` and ``dpctl.tensor.asarray``
    read it without a copy; ``dpnp.asarray`` copies it, but not the result of
    ``dpctl.tensor.asarray``. It has the buffer protocol where Python can read the memory and numpy
    has the element type. ``torch.asarray`` reads the buffer, as one dimension of float32 whatever
    the array holds; use ``torch.from_dlpack`` or ``torch.as_tensor``.

    Made by :meth:`Pool.array`, :meth:`Memory.array` and :func:`from_dlpack`.
    """

    __slots__ = ("address", "dtype", "is_read_only", "memory", "shape", "strides")

    def __init__(self, memory: Lender, shape: Any, dtype: Any, strides: Any, offset: int) -> None:
        offset = as_integer(offset, "offset")
        self.memory = memory
        """memory it lies in and keeps alive."""
        self.dtype: DType = as_dtype(dtype)
        """element type."""
        self.shape = as_shape(shape)
        """number of elements in each dimension."""
        self.strides = (
            contiguous_strides(self.shape) if strides is None else as_strides(strides, self.shape)
        )
        """strides in elements."""
        self.address = memory.address + offset
        """address of the first element."""
        self.is_read_only = memory.is_read_only
        """whether the lender forbids writes."""
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
        dims = zip(self.shape, self.strides, contiguous_strides(self.shape))
        return self.size < 2 or all(size == 1 or step == right for size, step, right in dims)

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
            stream: the consumer's ``dpctl.SyclQueue``, which will wait for the pool's queue. If it
                is None, for example where the host reads the memory, this call waits.
            max_version: newest version that the consumer supports; None or a major version below 1
                gives a legacy capsule.
            dl_device: device that the consumer wants; the host gets a copy of another device's
                memory.
            copy: True makes a copy, False forbids it.

        Raises:
            BufferError: the request cannot be met.
            ValueError: ``max_version`` or ``dl_device`` is not a pair of integers.
        """
        versioned = max_version is not None and as_pair(max_version, "max_version")[0] >= 1
        self._check()
        own = self.__dlpack_device__()
        target = own if dl_device is None else as_pair(dl_device, "dl_device")
        if target[0] not in (own[0], *TAKEN):
            raise BufferError(f"dl_device={dl_device!r} cannot read memory of device {own}")
        as_usm = target[0] == KDL_ONEAPI and own[0] == KDL_CPU
        if target[0] == KDL_ONEAPI:
            self._check_default_context(target)
        as_host = target == HOST and isinstance(self.memory, Buffered)
        moves = target != own and not as_usm and not as_host
        if moves and copy is False:
            raise BufferError(
                f"copy=False, but exporting from device {own} to {target} needs a copy"
            )
        if self.is_read_only and not versioned and not copy and not moves:
            raise BufferError(
                "a legacy capsule cannot say that memory is read-only; pass copy=True"
            )
        self._order(target, stream)
        if copy or moves:
            return self._copied(target)._capsule(target, versioned, IS_COPIED)
        return self._capsule(target, versioned, READ_ONLY if self.is_read_only else 0)

    @property
    def sycl_queue(self) -> Any:
        """The pool's queue.

        Raises:
            AttributeError: the memory belongs to another library.
        """
        if not isinstance(self.memory, Memory):
            raise AttributeError("memory of another library has no sycl_queue")
        return self.memory.sycl_queue

    @property
    def __sycl_usm_array_interface__(self) -> dict[str, Any]:
        """The description of the memory that dpctl and dpnp read.

        Raises:
            AttributeError: the memory belongs to another library, or numpy lacks the element type.
        """
        if not isinstance(self.memory, Memory):
            raise AttributeError("memory of another library has no __sycl_usm_array_interface__")
        if self.dtype.typestr is None:
            raise AttributeError(
                f"numpy has no {self.dtype.name}, so no array interface can name it"
            )
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
            raise BufferError(f"memory of another library cannot be exported as device {target}")
        queue = self.memory.pool.sycl_queue
        if queue is None:
            raise BufferError(f"memory without a SYCL queue cannot be exported as device {target}")
        device = queue.sycl_device
        if device.parent_device is not None:
            raise BufferError(
                "memory of a sub-device cannot be exported as memory of a oneAPI device"
            )
        if queue.sycl_context != device.sycl_platform.default_context:
            raise BufferError(
                "memory allocated in another SYCL context than the default one cannot be exported "
                "as memory of a oneAPI device"
            )
        if not self.address:
            raise BufferError(
                "an empty array has no address, so it cannot be exported as memory of a oneAPI "
                "device"
            )
        if target[1] != load_dpctl().get_devices().index(device):
            raise BufferError(f"dl_device={target} is not the device that the memory belongs to")

    def _order(self, target: tuple[int, ...], stream: Any) -> None:
        """Order the consumer's work after the pool's queue."""
        if target[0] == KDL_CPU and stream is not None:
            raise BufferError(f"stream={stream!r}: host memory has no stream; pass None")
        if not isinstance(self.memory, Memory):
            return
        queue = self.memory.pool.sycl_queue
        if stream is None:
            if queue is not None:
                queue.wait()
            return
        if not isinstance(stream, load_dpctl().SyclQueue):
            raise BufferError(f"stream={stream!r} is not a dpctl.SyclQueue")
        if stream != queue:
            stream.submit_barrier([queue.submit_barrier()])

    def _copied(self, target: tuple[int, ...]) -> Array:
        """A contiguous copy, in memory of the target device."""
        source = self.memory
        if not isinstance(source, (Memory, Buffered)):
            raise BufferError(
                "device memory of another library cannot be copied here; copy it with that library"
            )
        pool = source.pool if isinstance(source, Memory) else _shared_pool("cpu", "device")
        if target[0] == KDL_CPU and not pool.is_host_accessible:
            pool = _shared_pool(pool.sycl_queue, "host")
        copy: Array = pool.array(self.shape, self.dtype)
        if self.nbytes:
            pool.driver.write(copy.address, memoryview(self._contents()))
        return copy

    def _contents(self) -> bytes | memoryview:
        """The elements in C order; without a copy where another library lends them so."""
        itemsize = self.dtype.itemsize
        nbytes = extent(self.shape, self.strides) * itemsize
        if isinstance(self.memory, Memory):
            data: bytes | memoryview = self.memory.pool.driver.read(self.address, nbytes)
        else:
            data = bytes_at(self.address, nbytes)
        if self.is_contiguous:
            return data
        import numpy as np

        steps = [step * itemsize for step in self.strides]
        return np.ndarray(self.shape, f"V{itemsize}", data, strides=steps).tobytes()

    def _buffer(self) -> Any:
        """A numpy array of the same elements, which keeps the memory alive."""
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
        capsule = self.memory.capsule(view, versioned, flags)
        self._check()  # another thread may have released it before the capsule counted as a view
        return capsule


class _HostArray(Buffered, Array):  # type: ignore[misc]  # a C type is Any to mypy
    """An array with the buffer protocol."""

    __slots__ = ()


_HostArray.__name__ = _HostArray.__qualname__ = "Array"
