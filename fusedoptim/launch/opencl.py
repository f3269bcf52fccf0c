"""The CPU driver through OpenCL's C interface, which gives access to compiled programs.

SYCL gives no such access. So on the CPU, kernels are built, cached on the disk and launched here; a
launch is quicker too (docs/design/cached-programs.md). Only addresses are passed, so memory of SYCL
and of torch is treated alike.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import math
import operator
import os
import struct
import threading
from collections.abc import Callable
from itertools import starmap
from typing import Any, NamedTuple

from fusedoptim.allocator import loaded_files, loaded_isa, processor_features
from fusedoptim.launch.arguments import LOCAL, WORD, Frame, Packing
from fusedoptim.launch.backend import NO_TRAITS, BuildError, LaunchError, Limits, Traits
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
from fusedoptim.launch.parts import Parts, parts_of, team

_STACK = 64 << 10
"""Bytes that a kernel may take of the calling thread's stack."""
_SHORT = 250_000
"""Up to this many elements, a launch is so short that other Python threads may wait."""
_SETTINGS = "CL_CONFIG_"
"""Prefix of the driver's environment variables; some make it print what it compiles."""
_call = operator.methodcaller("__call__")
_lock = threading.RLock()  # a finalizer or a signal handler may take a step in the middle of a call


class OpenCLProgram(Owned):
    """A compiled module."""

    def __init__(self, driver: Driver, handle: ctypes.c_void_p) -> None:
        super().__init__(handle, driver.opencl.release_program)
        self.driver = driver

    def kernel(
        self, queue: Any, name: str, packing: Packing, traits: Traits = NO_TRAITS
    ) -> OpenCLKernel:
        """See :class:`fusedoptim.launch.backend.Program`; its queue is the driver's own."""
        return OpenCLKernel(self, name, packing, traits)


class Driver:
    """A device with a context and an in-order queue of its own."""

    def __init__(self, opencl: OpenCL, device: ctypes.c_void_p, identity: tuple[str, ...]) -> None:
        """``identity`` names what compiled programs depend on: the driver and the machine."""
        self.opencl = opencl
        self._device = device
        self._identity = identity
        self._context = opencl.make("clCreateContext", None, 1, ctypes.byref(device), None, None)
        self.queue = self._new_queue(0)
        self.progress = Progress()
        """The progress of ``queue``."""
        self._elements = 0  # of launches whose end is not known yet
        self._finish = functools.partial(opencl.finish, self.queue)
        self.own_thread: ctypes.c_void_p | None
        """A queue whose kernels run at once on the calling thread, if the driver has one."""
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
            except BuildError:  # made by another driver that has the same name
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
        """Put torch's threads to sleep if a kernel over about ``elements`` elements takes long.

        Call this before it is submitted to ``queue``, on the thread that then waits for it.
        """
        if self._elements < WORTH_SLEEPING <= self._elements + elements:
            put_to_sleep()
        self._elements += elements

    def finish(self) -> None:
        """Return when all that was submitted to ``queue`` has ended."""
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


class _Sizes(NamedTuple):
    """The sizes of a launch."""

    last: tuple[Any, ...]
    """The last arguments of the driver's function."""
    groups: int = 0
    """Work-groups, if they may run on the calling thread; 0 if not."""
    lanes: int = 0
    """Work items in a group."""


class _How(NamedTuple):
    """How a launch runs on the calling thread or on torch's."""

    sizes: _Sizes
    elements: int
    threads: int
    """The number of threads that may take part."""
    run: Callable[[], int]
    """Runs the launch, and returns the driver's answer."""


class OpenCLKernel:
    """A kernel on a driver's queue. Each frame has its own handle, and so its own arguments."""

    def __init__(self, program: OpenCLProgram, name: str, packing: Packing, traits: Traits) -> None:
        self.program = program
        self._driver = program.driver
        self._opencl = program.driver.opencl
        self._name = name
        self._packing = packing
        self._is_short, self._is_divisible = traits.is_short, traits.is_divisible
        self._is_light = traits.is_light
        self._enqueue_here = self._opencl.enqueue if traits.is_short else self._opencl.enqueue_long
        values = packing.values
        self._addresses = struct.Struct(f"<{packing.count}Q")  # with which a frame begins
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
        last = len(items), None, *in_c, 0, None, None
        if group is None or self._driver.own_thread is None:
            return _Sizes(last)
        lanes = math.prod(group)
        groups = math.prod(items) // lanes
        if groups > 1 and not self._is_divisible:
            return _Sizes(last)
        if not self._is_short and self.limits.private_mem_size * lanes > _STACK:
            return _Sizes(last)
        return _Sizes(last, groups, lanes)

    def prepare(self, frame: Frame) -> None:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        if frame.owner is not self:
            frame.given = frame.owner = None
            frame.how = None
            frame.kernel = self._new_handle()
            frame.parts = Parts(
                enqueue=self._opencl.enqueue_address,
                queue=self._driver.own_thread,
                kernel=frame.kernel.handle,
            )
            frame.owner = self  # last: after an interrupt, the next call makes all of it
        now, before = frame.buffer.raw, frame.given
        if now == before:
            return
        frame.given = None  # the handle may have any arguments if this is interrupted
        opencl, kernel, end = self._opencl, frame.kernel.handle, WORD * self._packing.count
        table, pointers = frame.table, self._packing.pointers
        if before is not None:  # calling the driver takes longer than finding what has changed
            old = self._addresses.unpack_from(before)
            pointers = tuple([i for i in pointers if table[i] != old[i]])
        handle = itertools.repeat(kernel)
        statuses: list[int] = []
        statuses += map(opencl.set_pointer, handle, pointers, [table[i] for i in pointers])
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

    def at_once(self, frame: Frame, sizes: Any, elements: int) -> Callable[[], int] | None:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        if on_host:  # raw kernels, which may write what this one reads
            wait_for_host()
        threads = sizes.groups  # 0: only the driver's can run it
        if threads > 1:
            found = team()
            threads = 0 if found is None else found.threads()
        progress = self._driver.progress
        if not threads or progress.latest is not progress.ended:
            return None
        how: _How | None = frame.how
        if how is None or (
            how.threads != threads or how.elements != elements or how.sizes is not sizes
        ):
            frame.how = None  # the parts may be of either launch if this is interrupted
            how = frame.how = self._how(frame, sizes, elements, threads)
        return how.run

    def submit(self, frame: Frame, sizes: Any, elements: int, events: list[Any]) -> bool:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`; an event is a status code."""
        run = self.at_once(frame, sizes, elements)
        if run is not None:
            events.extend(map(_call, (run,)))
            if events[-1] != SUCCESS:
                self.check(events.pop(), frame)
            if frame.meanwhile is not None and not frame.parts.meanwhile:
                frame.meanwhile()
            return False
        driver, progress = self._driver, self._driver.progress
        call = ((driver.queue, frame.kernel.handle, *sizes.last),)
        try:
            driver.expect(elements)
            progress.latest = object()
            events.extend(starmap(self._opencl.enqueue, call))
            if events[-1] != SUCCESS:
                status = events.pop()
                raise LaunchError(failure(status, "clEnqueueNDRangeKernel"))
            progress.latest = object()  # again: see Progress
        except BaseException:
            wake()
            raise
        if frame.meanwhile is not None:
            frame.meanwhile()
        return True

    def _how(self, frame: Frame, sizes: _Sizes, elements: int, threads: int) -> _How:
        """How to run a launch of this frame on ``threads`` threads."""
        of = sizes, elements, threads
        team_, parts = team(), frame.parts
        if not self._is_divisible or team_ is None:
            parts.done = 0
            call = self._driver.own_thread, frame.kernel.handle, *sizes.last
            return _How(*of, functools.partial(self._enqueue_here, *call))
        count = parts_of(sizes.groups, elements, threads, self._is_light)
        parts.groups, parts.lanes = sizes.groups, sizes.lanes
        parts.each = -(-sizes.groups // count)
        parts.region = team_.region if count > 1 else None
        parts.thread_number = team_.thread_number
        parts.meanwhile = ctypes.cast(frame.meanwhile, ctypes.c_void_p).value
        is_short = self._is_short and elements < _SHORT
        run = team_.run_short if is_short else team_.run
        return _How(*of, functools.partial(run, ctypes.addressof(parts)))

    def check(self, status: int, frame: Frame) -> None:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        if status == SUCCESS:
            return
        parts, refused = frame.parts, failure(status, "clEnqueueNDRangeKernel")
        if not parts.done:
            raise LaunchError(refused)
        raise RuntimeError(
            f"{refused} after {parts.done} of {parts.groups} work-groups: the kernel has "
            "written part of its results; load a checkpoint"
        )

    def wait(self, event: Any) -> None:
        """Return when the kernel has ended, and all kernels submitted before it."""
        if not self._driver.progress.wait(self._driver.finish):
            wake()  # another thread has seen the end


def build_log(device: Any, spirv: bytes, options: str) -> str:
    """The driver's log about a module that it refuses; "" if OpenCL does not have the device."""
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
