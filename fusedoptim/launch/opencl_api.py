"""OpenCL's C functions, from the library that SYCL has loaded."""

from __future__ import annotations

import atexit
import collections
import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fusedoptim.allocator import is_forked

# From OpenCL's headers, the same in all versions.
SUCCESS = 0
ALL_DEVICES = ctypes.c_uint64(0xFFFFFFFF)
PLATFORM_NAME, DEVICE_NAME, DRIVER_VERSION = 0x0902, 0x102B, 0x102D
BINARY_SIZES, BINARIES, BUILD_LOG = 0x1165, 0x1166, 0x1183
WORK_GROUP_SIZE, MULTIPLE, PRIVATE_MEMORY = 0x11B0, 0x11B3, 0x11B4
OUT_OF_ORDER, ON_CALLING_THREAD = 1 << 0, 1 << 31  # the latter by cl_intel_exec_by_local_thread
Handle = ctypes.c_void_p


class OpenCL:
    """The functions of OpenCL's loader."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        # These functions return at once: releasing the GIL would take longer than they do.
        short = ctypes.PyDLL(path)
        pointer, count = ctypes.c_void_p, ctypes.c_uint
        self.set_argument = short.clSetKernelArg
        self.set_argument.argtypes = (pointer, count, ctypes.c_size_t, pointer)
        self.set_pointer = short.clSetKernelArgSVMPointer
        self.set_pointer.argtypes = (pointer, count, pointer)
        # Its arguments are objects of ctypes, None and small numbers: these need no types.
        self.enqueue = short.clEnqueueNDRangeKernel
        self.enqueue_long = self._library.clEnqueueNDRangeKernel
        """Like ``enqueue``, but releases the GIL: for long kernels on the calling thread."""
        self.enqueue_address = ctypes.cast(self.enqueue, ctypes.c_void_p).value
        """The address of ``enqueue``, for machine code."""
        self.finish = self._library.clFinish
        self.finish.argtypes = (pointer,)
        self.release_kernel = short.clReleaseKernel
        self.release_kernel.argtypes = (pointer,)
        self.release_program = self._library.clReleaseProgram
        self.release_program.argtypes = (pointer,)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that returns a status, and raise if it failed."""
        check(self._library[function](*arguments), function)

    def make(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a function that returns a handle, and raise if its last argument says it failed."""
        release_ended()
        status = ctypes.c_int()
        call = self._library[function]
        call.restype = Handle
        handle = call(*arguments, ctypes.byref(status))
        check(status.value, function)
        return Handle(handle)

    def text(self, function: str, *arguments: Any) -> str:
        """The text that a function such as ``clGetDeviceInfo`` returns."""
        size = ctypes.c_size_t()
        self.call(function, *arguments, ctypes.c_size_t(), None, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(function, *arguments, size, buffer, None)
        return buffer.value.decode(errors="replace")

    def devices(self) -> Iterator[tuple[str, ctypes.c_void_p]]:
        """Each device, after the name of its platform."""
        for platform in self._listed("clGetPlatformIDs"):
            name = self.text("clGetPlatformInfo", platform, PLATFORM_NAME)
            for device in self._listed("clGetDeviceIDs", platform, ALL_DEVICES):
                yield name, device

    def _listed(self, function: str, *arguments: Any) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library[function](*arguments, 0, None, ctypes.byref(count)) != SUCCESS:
            return []  # there are none
        handles = (Handle * count.value)()
        self.call(function, *arguments, count, handles, None)
        return [Handle(handle) for handle in handles]


def check(status: int, function: str) -> None:
    """Raise if a function has failed."""
    if status != SUCCESS:
        raise RuntimeError(failure(status, function))


def failure(status: int, function: str) -> str:
    """The message about a function that has failed."""
    return f"the CPU driver's {function} failed with OpenCL's error {status}"


class Owned:
    """Something that the driver has made, released after this object has ended."""

    def __init__(self, handle: ctypes.c_void_p, release: Callable[[ctypes.c_void_p], int]) -> None:
        self.handle = handle
        self._release = release

    def __del__(self) -> None:
        if _ended is not None and hasattr(self, "_release"):  # at exit, modules are cleared
            _ended.append(self)


_ended: collections.deque[Owned] = collections.deque()


def release_ended() -> None:
    """Release what has ended and nothing uses.

    The garbage collector finalizes all objects of a cycle, in any order, before it frees any. So
    after the ``__del__`` of :class:`Owned`, that of another object may still launch the kernel.
    """
    if not _ended or is_forked():  # in a child there is no driver
        return
    alone = object()
    with contextlib.suppress(IndexError):  # other threads take from it too
        for _ in range(len(_ended)):
            owned = _ended.popleft()
            if sys.getrefcount(owned) > sys.getrefcount(alone):
                _ended.append(owned)
            else:
                owned._release(owned.handle)


def _after_collection(phase: str, _: object) -> None:
    if phase == "stop":
        release_ended()


@atexit.register
def _at_exit() -> None:
    with contextlib.suppress(ValueError):  # something else has removed it
        gc.callbacks.remove(_after_collection)


gc.callbacks.append(_after_collection)
