"""The CPU driver by OpenCL's C interface, which hands out what the driver has compiled.

The driver compiles a kernel in 40 to 70 ms, and a process's first in 200 ms; it reads what it has
compiled before in 1.2 ms. SYCL cannot keep a compiled program, so on the CPU kernels are
built, kept on the disk and launched here. To submit a kernel and wait for it takes 21 us between
other work, where it takes 31 us by SYCL.

Only addresses are passed, as integers, so the memory of SYCL and that of torch are alike here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

from fusedoptim.allocator import is_forked, loaded_files, loaded_isa
from fusedoptim.launch.cache import cached
from fusedoptim.launch.openmp import WORTH_SLEEPING, call_and_wake, put_to_sleep, wake
from fusedoptim.launch.progress import Progress, unwaited
from fusedoptim.launch.sycl import BuildError

# Of OpenCL's headers, the same in all its versions.
SUCCESS = 0
_ALL_DEVICES = ctypes.c_uint64(0xFFFFFFFF)
_PLATFORM_NAME, _DEVICE_NAME, _DRIVER_VERSION = 0x0902, 0x102B, 0x102D
_BINARY_SIZES, _BINARIES, _BUILD_LOG = 0x1165, 0x1166, 0x1183
_WORK_GROUP_SIZE, _MULTIPLE, _PRIVATE_MEMORY = 0x11B0, 0x11B3, 0x11B4

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
        self.set_pointer = short.clSetKernelArgSVMPointer
        self.set_pointer.argtypes = (pointer, count, pointer)
        # It takes objects of ctypes, None and small numbers, which need no types: 0.5 us less.
        self.enqueue = short.clEnqueueNDRangeKernel
        self.finish = self._library.clFinish
        self.finish.argtypes = (pointer,)
        self.release_kernel = short.clReleaseKernel
        self.release_kernel.argtypes = (pointer,)
        self.release_program = self._library.clReleaseProgram
        self.release_program.argtypes = (pointer,)

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

    def devices(self) -> Iterator[tuple[str, ctypes.c_void_p]]:
        """Each device, after the name of its platform."""
        for platform in self._listed("clGetPlatformIDs"):
            name = self.text("clGetPlatformInfo", platform, _PLATFORM_NAME)
            for device in self._listed("clGetDeviceIDs", platform, _ALL_DEVICES):
                yield name, device

    def _listed(self, function: str, *arguments: Any) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library[function](*arguments, 0, None, ctypes.byref(count)) != SUCCESS:
            return []  # there are none
        handles = (_Handle * count.value)()
        self.call(function, *arguments, count, handles, None)
        return [_Handle(handle) for handle in handles]


def check(status: int, function: str) -> None:
    """Raise if a function has failed.

    Raises:
        RuntimeError: so it has.
    """
    if status != SUCCESS:
        raise RuntimeError(f"the CPU driver's {function} failed with OpenCL's error {status}")


class Owned:
    """Something that the driver has made, released with this object."""

    def __init__(self, handle: ctypes.c_void_p, release: Callable[[ctypes.c_void_p], int]) -> None:
        """Take the handle.

        Args:
            handle: of it.
            release: OpenCL's function that releases it.
        """
        self.handle = handle
        self._release = release

    def __del__(self) -> None:
        # In a forked child there is no driver.
        if hasattr(self, "_release") and not is_forked():
            self._release(self.handle)


class Limits(NamedTuple):
    """What a device says of a kernel."""

    work_group_size: int
    """work items that a group may have."""
    preferred_work_group_size_multiple: int
    """what a group's size is best a multiple of."""
    private_mem_size: int
    """bytes that each work item needs."""


class Driver:
    """A device with a context and an in-order queue of its own."""

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
        self._elements = 0  # of launches whose end is not known yet
        self._finish = functools.partial(opencl.finish, self.queue)
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

    def program(self, spirv: bytes, options: str = "") -> Owned:
        """A module compiled for the device, from the disk if it was compiled before.

        Args:
            spirv: the module.
            options: for the driver's compiler.

        Raises:
            BuildError: the driver refuses the module.
        """
        if any(name.startswith(_SETTINGS) for name in os.environ):
            return self.compiled(spirv, options)
        made: list[Owned] = []

        def compile_now() -> bytes:
            made.append(self.compiled(spirv, options))
            return self._binary(made[0])

        parts = ("CPU driver", *self._identity, options, hashlib.sha256(spirv).hexdigest())
        keep = functools.partial(cached, parts, compile_now, lambda place, reason: None)
        binary = keep()
        if not made:
            try:
                return self._read(binary, options)
            except BuildError:  # of another driver, which calls itself the same
                keep(anew=True)
        return made[0]

    def compiled(self, spirv: bytes, options: str = "") -> Owned:
        """A module compiled now.

        Raises:
            BuildError: the driver refuses the module.
        """
        arguments = self._context, spirv, ctypes.c_size_t(len(spirv))
        return self._built("clCreateProgramWithIL", arguments, options)

    def _read(self, binary: bytes, options: str) -> Owned:
        arguments = (
            *(self._context, 1, ctypes.byref(self._device)),
            ctypes.byref(ctypes.c_size_t(len(binary))),
            ctypes.byref(ctypes.c_char_p(binary)),
            None,
        )
        return self._built("clCreateProgramWithBinary", arguments, options)

    def _built(self, function: str, arguments: tuple[Any, ...], options: str) -> Owned:
        """The program that ``function`` makes of its arguments."""
        opencl = self.opencl
        try:
            program = Owned(opencl.make(function, *arguments), opencl.release_program)
        except RuntimeError as error:
            raise BuildError(str(error)) from error
        device = ctypes.byref(self._device)
        try:
            opencl.call("clBuildProgram", program.handle, 1, device, options.encode(), None, None)
        except RuntimeError as error:
            log = opencl.text("clGetProgramBuildInfo", program.handle, self._device, _BUILD_LOG)
            log = log.strip()
            raise BuildError(f"{error}: {log or 'it does not say why'}", log) from error
        return program

    def _binary(self, program: Owned) -> bytes:
        size = ctypes.c_size_t()
        room, call, handle = ctypes.c_size_t(ctypes.sizeof(size)), self.opencl.call, program.handle
        call("clGetProgramInfo", handle, _BINARY_SIZES, room, ctypes.byref(size), None)
        binary = ctypes.create_string_buffer(size.value)
        place = _Handle(ctypes.addressof(binary))
        call("clGetProgramInfo", handle, _BINARIES, room, ctypes.byref(place), None)
        return binary.raw

    def kernel(self, program: Owned, name: str) -> Owned:
        """A kernel of a program, with room for its arguments: for one launch at a time.

        Raises:
            RuntimeError: the program has none of this name.
        """
        handle = self.opencl.make("clCreateKernel", program.handle, name.encode())
        return Owned(handle, self.opencl.release_kernel)

    def expect(self, elements: int) -> None:
        """Make way for a kernel that is about to be submitted to ``queue``, if it is a long one.

        The thread that calls this calls :meth:`finish` or :meth:`wait` afterwards.

        Args:
            elements: of the tensors that it goes through, about.
        """
        if self._elements < WORTH_SLEEPING <= self._elements + elements:
            put_to_sleep()
        self._elements += elements

    def finish(self) -> None:
        """Return when all has ended that was submitted to ``queue``."""
        self._elements = 0
        check(call_and_wake(self._finish), "clFinish")

    def wait(self) -> None:
        """As :meth:`finish`, unless all is known to have ended."""
        self.progress.wait(self.finish)
        wake()  # another thread may have seen the end

    def limits(self, kernel: Owned) -> Limits:
        """What the device says of a kernel."""
        facts = _WORK_GROUP_SIZE, _MULTIPLE, _PRIVATE_MEMORY
        return Limits(*[self._number(kernel, fact) for fact in facts])

    def _number(self, kernel: Owned, fact: int) -> int:
        number = ctypes.c_uint64()  # size_t and cl_ulong are alike
        size, place = ctypes.c_size_t(ctypes.sizeof(number)), ctypes.byref(number)
        self.opencl.call(
            "clGetKernelWorkGroupInfo", kernel.handle, self._device, fact, size, place, None
        )
        return number.value


class OpenCLLauncher:
    """Submits a kernel to a driver's queue. It has a handle, and so arguments, of its own."""

    def __init__(self, driver: Driver, program: Owned, name: str, lanes: int) -> None:
        """Make the handle.

        Args:
            driver: that has the program.
            program: that has the kernel.
            name: of the kernel.
            lanes: work items in a group.
        """
        self._driver = driver
        self._opencl = driver.opencl
        self._kernel = driver.kernel(program, name)
        self._address = ctypes.c_int64()
        self._set_address: int | None = None
        self._items = (ctypes.c_size_t * 1)()
        self._lanes = lanes
        sizes = None, self._items, (ctypes.c_size_t * 1)(lanes)
        arguments = self._kernel.handle, 1, *sizes, 0, None, None
        self._shared = ((driver.queue, *arguments),)
        """One call's arguments, on the queue of all."""
        self._own = ((driver.own_thread, *arguments),)

    def submit(self, address: int, items: int, elements: int, events: list[Any]) -> bool:
        """See :class:`fusedoptim.launch.backend.Launcher`; an event is the driver's answer."""
        if address != self._set_address:
            self._set_address = None  # whatever is set if this is interrupted
            self._address.value = address
            place = ctypes.byref(self._address)
            check(self._opencl.set_argument(self._kernel.handle, 0, 8, place), "clSetKernelArg")
            self._set_address = address
        self._items[0] = items
        if unwaited.queues:  # raw kernels, which may write what this one reads
            unwaited.wait()
        driver, progress = self._driver, self._driver.progress
        is_idle = progress.latest is progress.ended
        # One group uses one thread: this one has the tensors in its cache.
        at_once = items == self._lanes and driver.own_thread is not None and is_idle
        try:
            if not at_once:
                driver.expect(elements)
                driver.progress.submit()
            events.extend(starmap(self._opencl.enqueue, self._own if at_once else self._shared))
            if events[-1] != SUCCESS:
                check(events.pop(), "clEnqueueNDRangeKernel")
            if not at_once:
                driver.progress.submit()  # again: a thread may have seen the end of all before
        except BaseException:
            wake()
            raise
        return not at_once

    def wait(self, event: Any) -> None:
        """Return when the kernel has ended, and all that were submitted before."""
        self._driver.wait()


def driver_of(device: Any) -> Driver | None:
    """OpenCL's driver of a device.

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
        for found, device in opencl.devices():
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
