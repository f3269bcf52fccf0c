"""The CPU driver by OpenCL's C interface, which hands out what the driver has compiled.

SYCL gives no access to a compiled program. So on the CPU, kernels are built, cached on the disk and
launched here; a launch is quicker too (docs/design/kept-programs.md). Only addresses are passed, so
SYCL's memory and torch's are alike.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import os
import threading
from itertools import starmap
from typing import Any

from fusedoptim.allocator import loaded_files, loaded_isa, processor_features
from fusedoptim.launch.arguments import LOCAL, WORD, Frame, Packing
from fusedoptim.launch.backend import BuildError, LaunchError, Limits
from fusedoptim.launch.cache import cached
from fusedoptim.launch.opencl_api import (
    BINARIES,
    BINARY_SIZES,
    BUILD_LOG,
    DEVICE_NAME,
    DRIVER_VERSION,
    MULTIPLE,
    ON_CALLING_THREAD,
    OUT_OF_ORDER,
    PRIVATE_MEMORY,
    SUCCESS,
    WORK_GROUP_SIZE,
    Handle,
    OpenCL,
    Owned,
    check,
    failure,
)
from fusedoptim.launch.openmp import WORTH_SLEEPING, call_and_wake, put_to_sleep, wake
from fusedoptim.launch.order import Progress, on_host, wait_for_host

_STACK = 64 << 10
"""Bytes that a kernel may take of the calling thread's stack."""
_SETTINGS = "CL_CONFIG_"
"""Begins the environment variables that the driver reads; some have it print what it compiles."""
_lock = threading.RLock()  # a finalizer or a signal handler may take a step in the middle of a call


class OpenCLProgram(Owned):
    """A compiled module."""

    def __init__(self, driver: Driver, handle: ctypes.c_void_p) -> None:
        super().__init__(handle, driver.opencl.release_program)
        self.driver = driver

    def kernel(
        self, queue: Any, name: str, packing: Packing, is_short: bool = False
    ) -> OpenCLKernel:
        """See :class:`fusedoptim.launch.backend.Program`; its queue is the driver's own."""
        return OpenCLKernel(self, name, packing, is_short)


class Driver:
    """A device with a context and an in-order queue of its own."""

    def __init__(self, opencl: OpenCL, device: ctypes.c_void_p, identity: tuple[str, ...]) -> None:
        """``identity``, of the driver and the machine, names what compiled programs depend on."""
        self.opencl = opencl
        self._device = device
        self._identity = identity
        self._context = opencl.make("clCreateContext", None, 1, ctypes.byref(device), None, None)
        self.queue = self._new_queue(0)
        self.progress = Progress()
        """Of ``queue``."""
        self._elements = 0  # of launches whose end is not known yet
        self._finish = functools.partial(opencl.finish, self.queue)
        self.own_thread: ctypes.c_void_p | None
        """A queue whose kernels run at once on the calling thread, if the driver has such."""
        try:
            self.own_thread = self._new_queue(ON_CALLING_THREAD | OUT_OF_ORDER)
        except RuntimeError:
            self.own_thread = None

    def _new_queue(self, properties: int) -> ctypes.c_void_p:
        make = self.opencl.make
        return make(
            "clCreateCommandQueue", self._context, self._device, ctypes.c_uint64(properties)
        )

    def compile(self, spirv: bytes, options: str = "") -> OpenCLProgram:
        """A module compiled for the device, from the disk if it was compiled before."""
        if any(name.startswith(_SETTINGS) for name in os.environ):
            return self.compile_now(spirv, options)
        made: list[OpenCLProgram] = []

        def build() -> bytes:
            made.append(self.compile_now(spirv, options))
            return self._binary(made[0])

        parts = ("CPU driver", *self._identity, options, hashlib.sha256(spirv).hexdigest())
        keep = functools.partial(cached, parts, build, lambda place, reason: None)
        binary = keep()
        if not made:
            try:
                return self._read(binary, options)
            except BuildError:  # of another driver, which calls itself the same
                keep(rebuild=True)
        return made[0]

    def compile_now(self, spirv: bytes, options: str = "") -> OpenCLProgram:
        """A module compiled now, whatever the disk has."""
        arguments = self._context, spirv, ctypes.c_size_t(len(spirv))
        return self._built("clCreateProgramWithIL", arguments, options)

    def _read(self, binary: bytes, options: str) -> OpenCLProgram:
        arguments = (
            *(self._context, 1, ctypes.byref(self._device)),
            ctypes.byref(ctypes.c_size_t(len(binary))),
            ctypes.byref(ctypes.c_char_p(binary)),
            None,
        )
        return self._built("clCreateProgramWithBinary", arguments, options)

    def _built(self, function: str, arguments: tuple[Any, ...], options: str) -> OpenCLProgram:
        """The program that ``function`` makes of its arguments."""
        opencl = self.opencl
        try:
            program = OpenCLProgram(self, opencl.make(function, *arguments))
        except RuntimeError as error:
            raise BuildError(str(error)) from error
        device = ctypes.byref(self._device)
        try:
            opencl.call("clBuildProgram", program.handle, 1, device, options.encode(), None, None)
        except RuntimeError as error:
            log = opencl.text("clGetProgramBuildInfo", program.handle, self._device, BUILD_LOG)
            log = log.strip()
            raise BuildError(f"{error}: {log or 'it gives no reason'}", log) from error
        return program

    def _binary(self, program: Owned) -> bytes:
        size = ctypes.c_size_t()
        room, call, handle = ctypes.c_size_t(ctypes.sizeof(size)), self.opencl.call, program.handle
        call("clGetProgramInfo", handle, BINARY_SIZES, room, ctypes.byref(size), None)
        binary = ctypes.create_string_buffer(size.value)
        place = Handle(ctypes.addressof(binary))
        call("clGetProgramInfo", handle, BINARIES, room, ctypes.byref(place), None)
        return binary.raw

    def expect(self, elements: int) -> None:
        """Make way for a kernel that goes through about so many elements, if that is many.

        To be called before it is submitted to ``queue``, by the thread that then waits for it.
        """
        if self._elements < WORTH_SLEEPING <= self._elements + elements:
            put_to_sleep()
        self._elements += elements

    def finish(self) -> None:
        """Return when all has ended that was submitted to ``queue``."""
        self._elements = 0
        if status := call_and_wake(self._finish):
            check(status, "clFinish")

    def limits(self, kernel: Owned) -> Limits:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        facts = WORK_GROUP_SIZE, MULTIPLE, PRIVATE_MEMORY
        return Limits(*[self._number(kernel, fact) for fact in facts])

    def _number(self, kernel: Owned, fact: int) -> int:
        number = ctypes.c_uint64()  # size_t and cl_ulong are alike
        size, place = ctypes.c_size_t(ctypes.sizeof(number)), ctypes.byref(number)
        self.opencl.call(
            "clGetKernelWorkGroupInfo", kernel.handle, self._device, fact, size, place, None
        )
        return number.value


class OpenCLKernel:
    """A kernel on a driver's queue. Each frame has a handle, and so arguments, of its own."""

    def __init__(self, program: OpenCLProgram, name: str, packing: Packing, is_short: bool) -> None:
        self.program = program
        self._driver = program.driver
        self._opencl = program.driver.opencl
        self._name = name
        self._packing = packing
        self._is_short = is_short
        self._enqueue_here = self._opencl.enqueue if is_short else self._opencl.enqueue_long
        values = packing.values
        self._by_value = [value.argument for value in values], [value.size for value in values]

    def _new_handle(self) -> Owned:
        handle = self._opencl.make("clCreateKernel", self.program.handle, self._name.encode())
        return Owned(handle, self._opencl.release_kernel)

    @functools.cached_property
    def limits(self) -> Limits:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        return self._driver.limits(self._new_handle())

    def sizes(self, items: tuple[int, ...], group: tuple[int, ...] | None) -> Any:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        in_c = [None if size is None else (ctypes.c_size_t * 3)(*size) for size in (items, group)]
        # One group uses one thread: this one has its memory in the cache.
        is_here = items == group and self._driver.own_thread is not None
        if is_here and not self._is_short:
            is_here = self.limits.private_mem_size * math.prod(items) <= _STACK
        return is_here, (len(items), None, *in_c, 0, None, None)

    def prepare(self, frame: Frame) -> None:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        if frame.owner is not self:
            frame.given, frame.owner = None, self
            frame.kernel = self._new_handle()
        now, before = frame.buffer.raw, frame.given
        if now == before:
            return
        frame.given = None  # the handle may have any arguments if this is interrupted
        opencl, kernel, end = self._opencl, frame.kernel.handle, WORD * self._packing.count
        handle, table = itertools.repeat(kernel), frame.table
        statuses: list[int] = []
        if before is None or now[:end] != before[:end]:
            pointers = self._packing.pointers
            addresses = [table[i] for i in pointers]
            statuses += map(opencl.set_pointer, handle, pointers, addresses)
        if before is None or now[end:] != before[end:]:
            indices, sizes = self._by_value
            values = [table[i] for i in indices]
            statuses += map(opencl.set_argument, handle, indices, sizes, values)
            for i, place, _ in self._packing.local:
                nbytes = LOCAL.unpack_from(frame.buffer, place)[2]
                statuses.append(opencl.set_argument(kernel, i, nbytes, None))
        for status in filter(None, statuses):
            check(status, "clSetKernelArg")
        frame.given = now

    def submit(self, frame: Frame, sizes: Any, elements: int, events: list[Any]) -> bool:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`; an event is the driver's answer."""
        is_here, last = sizes
        if on_host:  # raw kernels, which may write what this one reads
            wait_for_host()
        driver, progress = self._driver, self._driver.progress
        at_once = is_here and progress.latest is progress.ended
        enqueue = self._enqueue_here if at_once else self._opencl.enqueue
        queue = driver.own_thread if at_once else driver.queue
        call = ((queue, frame.kernel.handle, *last),)
        try:
            if not at_once:
                driver.expect(elements)
                progress.latest = object()
            events.extend(starmap(enqueue, call))
            if events[-1] != SUCCESS:
                status = events.pop()
                raise LaunchError(failure(status, "clEnqueueNDRangeKernel"))
            if not at_once:
                progress.latest = object()  # again: see Progress
        except BaseException:
            wake()
            raise
        return not at_once

    def wait(self, event: Any) -> None:
        """Return when the kernel has ended, and all that were submitted before."""
        if not self._driver.progress.wait(self._driver.finish):
            wake()  # another thread has seen the end


def build_log(device: Any, spirv: bytes, options: str) -> str:
    """What the driver says against a module that it refuses, if OpenCL has the device, or ""."""
    driver = driver_of(device)
    try:
        if driver is not None:
            driver.compile_now(spirv, options)
    except BuildError as error:
        return error.log
    return ""


def driver_of(device: Any) -> Driver | None:
    """OpenCL's driver of a dpctl.SyclDevice whose queue was made, or None if it has none."""
    with _lock:  # the kernels of one update are ordered by the queue that they share
        return _driver(device.sycl_platform.name, device.name, device.driver_version)


@functools.cache
def _driver(platform: str, name: str, version: str) -> Driver | None:
    loaders = [p for p in loaded_files() if os.path.basename(p).startswith("libOpenCL.so")]
    for loader in loaders:
        opencl = OpenCL(loader)
        for found, device in opencl.devices():
            described = [
                opencl.text("clGetDeviceInfo", device, fact)
                for fact in (DEVICE_NAME, DRIVER_VERSION)
            ]
            if [found, *described] == [platform, name, version]:
                target = loaded_isa() or "", os.environ.get("FUSEDOPTIM_ISA", "")
                identity = platform, name, version, *target, processor_features()
                return Driver(opencl, device, identity)
    return None
