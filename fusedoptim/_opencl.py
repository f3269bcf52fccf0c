"""The CPU driver by OpenCL's C interface, which hands out what the driver has compiled.

The driver compiles a kernel in 40 to 70 ms, and a process's first in 200 ms; it reads what it has
compiled before in 1.2 ms. SYCL's interface cannot keep a compiled program, so on the CPU the
optimizers' kernels are built, kept on the disk and launched here. To submit a kernel and wait for
it takes 21 us between other work, where it takes 31 us by SYCL.

Only addresses are passed, as integers, so the memory of SYCL and that of torch are alike here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedoptim._cache import cached
from fusedoptim._program import BuildError
from fusedoptim._progress import Progress, unwaited
from fusedoptim.allocator import is_forked, loaded_files, loaded_isa

# Of OpenCL's headers, the same in all its versions.
_SUCCESS = 0
_DEVICE_TYPE_CPU = ctypes.c_uint64(2)
_PLATFORM_NAME, _DEVICE_NAME, _DRIVER_VERSION = 0x0902, 0x102B, 0x102D
_BINARY_SIZES, _BINARIES, _BUILD_LOG = 0x1165, 0x1166, 0x1183

_OUT_OF_ORDER, _ON_CALLING_THREAD = 1 << 0, 1 << 31  # the latter by cl_intel_exec_by_local_thread

_SETTINGS = "CL_CONFIG_"
"""Begins the environment variables that the driver reads; some have it print what it compiles."""
_Handle = ctypes.c_void_p
_lock = threading.RLock()  # a finalizer or a signal handler may take a step in the middle of a call


class OpenCL:
    """The functions of OpenCL's loader."""

    def __init__(self, path: str) -> None:
        """Load it.

        Args:
            path: of the library, which SYCL has loaded: it knows the same drivers.
        """
        self._library = ctypes.CDLL(path)
        # These return at once. To give Python's lock away for them takes longer than they do.
        short = ctypes.PyDLL(path)
        pointer, count = ctypes.c_void_p, ctypes.c_uint
        self.set_argument = short.clSetKernelArg
        self.set_argument.argtypes = (pointer, count, ctypes.c_size_t, pointer)
        self.enqueue = short.clEnqueueNDRangeKernel
        self.enqueue.argtypes = (
            *(pointer, pointer, count, pointer, pointer, pointer),
            *(count, pointer, pointer),
        )
        self.finish = self._library.clFinish
        self.finish.argtypes = (pointer,)
        self.release_kernel = short.clReleaseKernel
        self.release_kernel.argtypes = (pointer,)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function that returns a status.

        Raises:
            RuntimeError: it failed.
        """
        check(self._library[function](*arguments), function)

    def make(self, function: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a function that returns a handle, and its status by its last argument.

        Raises:
            RuntimeError: it failed.
        """
        status = ctypes.c_int()
        call = self._library[function]
        call.restype = _Handle
        handle = call(*arguments, ctypes.byref(status))
        check(status.value, function)
        return _Handle(handle)

    def text(self, function: str, *arguments: Any) -> str:
        """What a function of the kind of ``clGetDeviceInfo`` tells."""
        size = ctypes.c_size_t()
        self.call(function, *arguments, ctypes.c_size_t(), None, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self.call(function, *arguments, size, buffer, None)
        return buffer.value.decode(errors="replace")

    def cpus(self) -> Iterator[tuple[str, ctypes.c_void_p]]:
        """Each CPU device, after the name of its platform."""
        count = ctypes.c_uint()
        self.call("clGetPlatformIDs", 0, None, ctypes.byref(count))
        platforms = (_Handle * count.value)()
        self.call("clGetPlatformIDs", count, platforms, None)
        for platform in map(_Handle, platforms):
            device = _Handle()
            found = self._library.clGetDeviceIDs(
                platform, _DEVICE_TYPE_CPU, 1, ctypes.byref(device), None
            )
            if found == _SUCCESS:  # others have no CPU
                yield self.text("clGetPlatformInfo", platform, _PLATFORM_NAME), device


def check(status: int, function: str) -> None:
    """Raise if a function has failed.

    Raises:
        RuntimeError: so it has.
    """
    if status != _SUCCESS:
        raise RuntimeError(f"the CPU driver's {function} failed with OpenCL's error {status}")


class Driver:
    """A CPU device with a context and an in-order queue of its own."""

    def __init__(self, opencl: OpenCL, device: ctypes.c_void_p, identity: tuple[str, ...]) -> None:
        """Make the context and the queue.

        Args:
            opencl: that has the device.
            device: its handle.
            identity: of the driver and the machine, by which compiled programs are kept.
        """
        self.opencl = opencl
        self._device = device
        self._identity = identity
        self._context = opencl.make("clCreateContext", None, 1, ctypes.byref(device), None, None)
        self.queue = self._new_queue(0)
        self.progress = Progress()
        """Of ``queue``."""
        self.own_thread: ctypes.c_void_p | None
        """A queue whose kernels run at once on the calling thread, if the driver has such."""
        try:
            self.own_thread = self._new_queue(_ON_CALLING_THREAD | _OUT_OF_ORDER)
        except RuntimeError:
            self.own_thread = None

    def _new_queue(self, properties: int) -> ctypes.c_void_p:
        make = self.opencl.make
        return make(
            "clCreateCommandQueue", self._context, self._device, ctypes.c_uint64(properties)
        )

    def program(self, spirv: bytes) -> ctypes.c_void_p:
        """A module compiled for the device, from the disk if it was compiled before.

        Raises:
            BuildError: the driver refuses the module.
        """
        if any(name.startswith(_SETTINGS) for name in os.environ):
            return self._compiled(spirv)
        made: list[ctypes.c_void_p] = []

        def compile_now() -> bytes:
            made.append(self._compiled(spirv))
            return self._binary(made[0])

        parts = ("CPU driver", *self._identity, hashlib.sha256(spirv).hexdigest())
        binary = cached(parts, compile_now, unkept=lambda place, reason: None)
        if made:
            return made[0]
        try:
            return self._read(binary)
        except (RuntimeError, BuildError):  # another driver, which calls itself the same
            return self._compiled(spirv)

    def _compiled(self, spirv: bytes) -> ctypes.c_void_p:
        program = self.opencl.make(
            "clCreateProgramWithIL", self._context, spirv, ctypes.c_size_t(len(spirv))
        )
        self._build(program)
        return program

    def _read(self, binary: bytes) -> ctypes.c_void_p:
        program = self.opencl.make(
            "clCreateProgramWithBinary",
            *(self._context, 1, ctypes.byref(self._device)),
            ctypes.byref(ctypes.c_size_t(len(binary))),
            ctypes.byref(ctypes.c_char_p(binary)),
            None,
        )
        self._build(program)
        return program

    def _build(self, program: ctypes.c_void_p) -> None:
        try:
            self.opencl.call(
                "clBuildProgram", program, 1, ctypes.byref(self._device), b"", None, None
            )
        except RuntimeError as error:
            log = self.opencl.text("clGetProgramBuildInfo", program, self._device, _BUILD_LOG)
            raise BuildError(f"{error}: {log.strip() or 'it does not say why'}") from error

    def _binary(self, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        room = ctypes.c_size_t(ctypes.sizeof(size))
        self.opencl.call("clGetProgramInfo", program, _BINARY_SIZES, room, ctypes.byref(size), None)
        binary = ctypes.create_string_buffer(size.value)
        place = _Handle(ctypes.addressof(binary))
        self.opencl.call("clGetProgramInfo", program, _BINARIES, room, ctypes.byref(place), None)
        return binary.raw


class OpenCLLauncher:
    """Submits one kernel. OpenCL keeps arguments with a kernel's handle, so this has its own."""

    def __init__(
        self, queue: Any, driver: Driver, program: ctypes.c_void_p, name: str, lanes: int
    ) -> None:
        """Make the handle.

        Args:
            queue: the device's SYCL queue.
            driver: that has the program.
            program: that has the kernel.
            name: of the kernel.
            lanes: work items in a group.
        """
        self._wait_for_sycl = queue.wait
        self._driver = driver
        self._opencl = opencl = driver.opencl
        self._kernel = opencl.make("clCreateKernel", program, name.encode())
        self._release = opencl.release_kernel
        self._address = ctypes.c_int64()
        self._set_address: int | None = None
        self._items = (ctypes.c_size_t * 1)()
        self._lanes = lanes
        sizes = (None,), (self._items,), ((ctypes.c_size_t * 1)(lanes),)
        self._arguments = (self._kernel,), (1,), *sizes, (0,), (None,), (None,)
        self._may_run = False

    def submit(self, address: int, items: int, events: list[Any]) -> None:
        """Submit the kernel, and add the driver's answer to ``events`` in the same call of C.

        Args:
            address: the kernel's argument.
            items: work items in all.
            events: of this step's launches.

        Raises:
            RuntimeError: the driver refuses it; then ``events`` is as it was.
        """
        if address != self._set_address:
            self._set_address = None  # whatever is set if this is interrupted
            self._address.value = address
            place = ctypes.byref(self._address)
            check(self._opencl.set_argument(self._kernel, 0, 8, place), "clSetKernelArg")
            self._set_address = address
        self._items[0] = items
        if not unwaited.is_idle:  # raw kernels, which may write what this one reads
            latest = unwaited.latest
            self._wait_for_sycl()
            unwaited.end(latest)
        driver = self._driver
        # One group uses one thread: this one has the tensors in its cache. 18 us for 22.
        if items == self._lanes and driver.own_thread is not None and driver.progress.is_idle:
            queue = driver.own_thread
        else:
            queue = driver.queue
            self._may_run = True
            driver.progress.submit()
        events.extend(map(self._opencl.enqueue, (queue,), *self._arguments))
        if queue is driver.queue:
            driver.progress.submit()  # again: a thread may have seen the end of all before
        if events[-1] != _SUCCESS:
            check(events.pop(), "clEnqueueNDRangeKernel")

    def wait(self, event: Any) -> None:
        """Return when the kernel has ended, and all that were submitted before."""
        if self._may_run:
            latest = self._driver.progress.latest
            check(self._opencl.finish(self._driver.queue), "clFinish")
            self._driver.progress.end(latest)
            self._may_run = False

    def __del__(self) -> None:
        # In a forked child there is no driver.
        if hasattr(self, "_release") and not is_forked():
            self._release(self._kernel)


def driver_of(device: Any) -> Driver | None:
    """OpenCL's driver of a CPU.

    Args:
        device: a dpctl.SyclDevice, after its queue was made.

    Returns:
        None if OpenCL does not have the device.
    """
    with _lock:  # the kernels of one update are ordered by the queue that they share
        return _driver(device.sycl_platform.name, device.name, device.driver_version)


@functools.cache
def _driver(platform: str, name: str, version: str) -> Driver | None:
    loaders = [p for p in loaded_files() if os.path.basename(p).startswith("libOpenCL.so")]
    for loader in loaders:
        opencl = OpenCL(loader)
        for found, device in opencl.cpus():
            described = [
                opencl.text("clGetDeviceInfo", device, fact)
                for fact in (_DEVICE_NAME, _DRIVER_VERSION)
            ]
            if [found, *described] == [platform, name, version]:
                target = loaded_isa() or "", os.environ.get("FUSEDOPTIM_ISA", "")
                identity = platform, name, version, *target, _processor_features()
                return Driver(opencl, device, identity)
    return None


def _processor_features() -> str:
    """What the processor has and the system lets programs use, of which the driver may use all."""
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        return ""
