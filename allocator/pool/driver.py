"""SYCL USM memory as segments of one kind, allocated on one queue."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, Protocol

from allocator.exchange.devices import HOST, oneapi_device
from allocator.exchange.dlpack import c_api
from allocator.runtime.devices import KINDS
from allocator.runtime.fork import check_not_forked, note_driver_runs
from allocator.runtime.kinds import is_host
from allocator.runtime.libraries import load_dpctl

HUGE_PAGE = 2 << 20
_ALIGNMENT = 512
_WRITABLE = 0x200  # PyBUF_WRITE of CPython's memoryobject.h
_view_of = c_api(
    "PyMemoryView_FromMemory", ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)


class Driver(Protocol):
    """A source of segments: :class:`UsmDriver`, or one of a test."""

    name: str
    """name of the device."""
    capacity: int
    """bytes of the device's memory."""
    is_host_accessible: bool
    """Whether Python may read and write the memory."""
    dlpack_device: tuple[int, int]
    queue: Any
    """the dpctl.SyclQueue, or None."""

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of new memory, and a handle that keeps it; raises MemoryError."""

    def release(self, handle: Any) -> None:
        """Return memory."""

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at an address, after the queue has finished its work."""

    def write(self, address: int, data: memoryview) -> None:
        """Write bytes to an address, after the queue has finished its work."""


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Bytes that the host can read and write, without a copy.

    ctypes.string_at counts the bytes in a C int, and copies too few of 2 GiB and more.
    """
    view: memoryview = _view_of(address, nbytes, _WRITABLE)
    return view


class UsmDriver:
    """SYCL USM memory of one kind."""

    def __init__(self, queue: Any, kind: str) -> None:
        """Memory of the device of ``queue``; RuntimeError if it has none of this kind."""
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
        check_not_forked()
        dpctl = load_dpctl()
        device = queue.sycl_device
        if not getattr(device, f"has_aspect_usm_{kind}_allocations"):
            raise RuntimeError(
                f"{device.name} lacks usm_{kind}_allocations; use a pool of another kind"
            )
        note_driver_runs()
        self.queue = queue
        self.name = device.name
        self.capacity = device.global_mem_size
        self._largest = device.max_mem_alloc_size
        self._new = getattr(dpctl.memory, f"MemoryUSM{kind.capitalize()}")
        self._error = dpctl.memory.USMAllocationError
        self.is_host_accessible = is_host(device) or kind != "device"
        self.dlpack_device = HOST if self.is_host_accessible else oneapi_device(device)

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        """The address of new memory, and the object that keeps it; raises MemoryError."""
        if nbytes > self._largest:
            raise MemoryError(
                f"{self.name} allocates at most {self._largest:,} bytes at once "
                "(max_mem_alloc_size)"
            )
        # Lets the kernel use huge pages: one page fault for each 2 MiB.
        alignment = HUGE_PAGE if nbytes >= HUGE_PAGE else _ALIGNMENT
        try:
            memory = self._new(nbytes, alignment=alignment, queue=self.queue)
        except self._error as error:
            raise MemoryError(f"{self.name}: {error}") from error
        address, _ = memory.__sycl_usm_array_interface__["data"]
        return address, memory

    def release(self, handle: Any) -> None:
        """Return memory once nothing on the queue uses it.

        ``sycl::free`` does not wait for commands, so this method does. The memory is freed with its
        last reference; dpctl and dpnp hold one for each of their views.
        """
        self.queue.wait()

    def read(self, address: int, nbytes: int) -> bytes:
        """The bytes at an address, once the queue is done."""
        self.queue.wait()
        if self.is_host_accessible:
            return bytes(bytes_at(address, nbytes))
        data = bytearray(nbytes)
        self.queue.memcpy(data, self._view(address, nbytes), nbytes)
        return bytes(data)

    def write(self, address: int, data: memoryview) -> None:
        """Put bytes at an address, once the queue is done."""
        self.queue.wait()
        if self.is_host_accessible:
            bytes_at(address, data.nbytes)[:] = data
        else:
            self.queue.memcpy(self._view(address, data.nbytes), data, data.nbytes)

    def _view(self, address: int, nbytes: int) -> Any:
        """The memory as an object that dpctl can copy."""
        interface = {
            "data": (address, False),
            "shape": (nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 1,
            "syclobj": self.queue,
        }
        view = SimpleNamespace(__sycl_usm_array_interface__=interface)
        return load_dpctl().memory.as_usm_memory(view)
