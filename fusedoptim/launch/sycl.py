"""Kernels built and launched by SYCL, through the C library under dpctl.

dpctl's Python interface passes no host pointer to a kernel, although the CPU device reads one like
any other. And its ``dpctl.program.create_program_from_spirv`` makes all other threads wait while
the driver compiles.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Callable, Sequence
from itertools import starmap, tee
from typing import Any, NamedTuple

from fusedoptim.allocator import is_forked, load_dpctl
from fusedoptim.launch.arguments import WORD, Frame, Packing
from fusedoptim.launch.backend import NO_TRAITS, BuildError, LaunchError, Limits, Traits
from fusedoptim.launch.opencl import build_log
from fusedoptim.launch.order import InFlight, in_flight_on, on_host, wait_for_host

# Of the enumeration DPCTLKernelArgType, the same in dpctl 0.17 to 0.22. To the driver, a value is
# only bytes, so the type says only how many.
_BY_SIZE = {1: 1, 2: 3, 4: 5, 8: 7}
_POINTER, _LOCAL_MEMORY = 10, 11
_ANY_SIZE = 13  # a raw kernel argument, of dpctl 0.21 and newer
_COMPLETE = 3  # of DPCTLSyclEventStatusType


class SyclEvent(ctypes.c_void_p):
    """The end of a launch; false if the driver refused it."""

    __hash__ = object.__hash__  # ctypes' own types have none

    def wait(self) -> None:
        """Return when the kernel has ended."""
        _functions().wait(self)

    @property
    def has_ended(self) -> bool:
        """Whether the kernel has ended."""
        return not self or _functions().status(self) == _COMPLETE

    def __del__(self) -> None:
        if self and not is_forked():
            self._delete(self)

    _delete: Callable[[SyclEvent], None]


class _Functions(NamedTuple):
    """Functions of dpctl's C library."""

    submit: Any
    submit_groups: Any
    wait: Any
    status: Any
    raw_argument: Any
    """Makes an argument of any size, None where dpctl has none."""
    delete_raw_argument: Any


@functools.cache
def dpctl_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of dpctl's C library with ctypes' types, or None if this dpctl has none."""
    folder = os.path.dirname(str(load_dpctl().__file__))
    library = ctypes.CDLL(os.path.join(folder, "libDPCTLSyclInterface.so"))
    found = getattr(library, name, None)
    if found is not None:
        found.restype, found.argtypes = result, arguments
    return found


@functools.cache
def _functions() -> _Functions:
    """The functions that a launch needs."""
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    submission = [pointer, pointer, pointer, pointer, size]
    SyclEvent._delete = dpctl_function("DPCTLEvent_Delete", None, pointer)
    return _Functions(
        submit=dpctl_function(
            "DPCTLQueue_SubmitRange", SyclEvent, *submission, pointer, size, pointer, size
        ),
        submit_groups=dpctl_function(
            "DPCTLQueue_SubmitNDRange",
            SyclEvent,
            *(*submission, pointer, pointer, size, pointer, size),
        ),
        wait=dpctl_function("DPCTLEvent_Wait", None, pointer),
        status=dpctl_function("DPCTLEvent_GetCommandExecutionStatus", ctypes.c_int, pointer),
        raw_argument=dpctl_function("DPCTLRawKernelArg_Create", pointer, pointer, size),
        delete_raw_argument=dpctl_function("DPCTLRawKernelArg_Delete", None, pointer),
    )


class SyclCompiler(NamedTuple):
    """The compiler of one device."""

    context: Any
    device: Any
    is_ordered: bool
    """Whether its kernels may use memory that kernels on other queues use too."""

    @classmethod
    def of(cls, queue: Any, is_ordered: bool) -> SyclCompiler:
        """The compiler for the device of a ``dpctl.SyclQueue``."""
        return cls(queue.sycl_context, queue.sycl_device, is_ordered)

    def compile(self, spirv: bytes, options: str = "") -> SyclProgram:
        """See :class:`fusedoptim.launch.backend.Compiler`."""
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        takes = pointer, pointer, text, ctypes.c_size_t, text
        create = dpctl_function("DPCTLKernelBundle_CreateFromSpirv", pointer, *takes)
        delete = dpctl_function("DPCTLKernelBundle_Delete", None, pointer)
        context, device = self.context.addressof_ref(), self.device.addressof_ref()
        bundle = create(context, device, spirv, len(spirv), options.encode())
        if bundle is None:  # dpctl does not return the driver's log
            log = build_log(self.device, spirv, options)
            raise BuildError(log or "the driver gives no reason", log)
        try:
            return SyclProgram(_program_maker()(bundle), self.is_ordered)
        finally:
            delete(bundle)


@functools.cache
def _program_maker() -> Callable[[int], Any]:
    """``SyclProgram_Make`` of dpctl's C API for Python: it copies the handle that it is given."""
    capsule = load_dpctl().program._program.__pyx_capi__["SyclProgram_Make"]
    python = ctypes.pythonapi
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", python))
    address_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", python)
    )
    make = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p)
    return make(address_of(capsule, name_of(capsule)))


class SyclProgram(NamedTuple):
    """A compiled module."""

    program: Any
    """A dpctl.program.SyclProgram."""
    is_ordered: bool
    """See :class:`SyclCompiler`."""

    def kernel(
        self, queue: Any, name: str, packing: Packing, traits: Traits = NO_TRAITS
    ) -> SyclKernel:
        """See :class:`fusedoptim.launch.backend.Program`."""
        in_flight = in_flight_on(queue, self.is_ordered)
        return SyclKernel(queue, self.program.get_sycl_kernel(name), packing, in_flight)


class SyclKernel:
    """A kernel on a SYCL queue."""

    def __init__(self, queue: Any, handle: Any, packing: Packing, in_flight: InFlight) -> None:
        """``queue`` is a dpctl.SyclQueue, ``handle`` a dpctl.program.SyclKernel."""
        self.handle = handle
        self._in_flight = in_flight
        types = [_POINTER] * packing.count
        for value in packing.values:
            types[value.argument] = _BY_SIZE.get(value.size, _ANY_SIZE)
        for value in packing.local:
            types[value.argument] = _LOCAL_MEMORY
        self._of_any_size = [v for v in packing.values if v.size not in _BY_SIZE]
        self._described = (ctypes.c_int * max(len(types), 1))(*types), packing.count
        self._queue = queue  # which must live as long as its address is used
        self._refs = handle.addressof_ref(), queue.addressof_ref()
        self._wait = _functions().wait

    @functools.cached_property
    def limits(self) -> Limits:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        return Limits(*[int(getattr(self.handle, name)) for name in Limits._fields])

    def sizes(self, items: tuple[int, ...], group: tuple[int, ...] | None) -> Any:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        # SYCL's last dimension is the one that OpenCL calls 0.
        given = [(ctypes.c_size_t * 3)(*size[::-1]) for size in (items, group) if size]
        submit = _functions().submit if group is None else _functions().submit_groups
        return submit, (*given, len(items), None, 0)

    def prepare(self, frame: Frame) -> None:
        """A submission takes the arguments itself."""

    def at_once(self, frame: Frame, sizes: Any, elements: int) -> None:
        """None: a SYCL queue always takes the kernel."""

    def check(self, status: int, frame: Frame) -> None:
        """There is nothing to check."""

    def submit(self, frame: Frame, sizes: Any, elements: int, events: list[Any]) -> bool:
        """See :class:`fusedoptim.launch.backend.DeviceKernel`."""
        if on_host and self._in_flight.is_ordered:
            wait_for_host(but_for=self._in_flight)
        made = self._of_any_size and self._make_any_size(frame)
        function, last = sizes
        call = *self._refs, frame.buffer, *self._described, *last
        try:
            events.extend(starmap(function, (call,)))
        finally:
            if made:
                _delete_any_size(made)
        if not events[-1]:
            events.pop()
            raise LaunchError(_REFUSED)
        if frame.meanwhile is not None:
            frame.meanwhile()
        return True

    def submit_unwaited(self, frame: Frame, sizes: Any, owners: Any) -> None:
        """Submit the kernel, whose end nobody will wait for; keep the ``owners`` of its memory."""
        if on_host and self._in_flight.is_ordered:
            wait_for_host(but_for=self._in_flight)
        if self._in_flight.owners:
            self._in_flight.drop_ended()
        made = self._of_any_size and self._make_any_size(frame)
        function, last = sizes
        call = *self._refs, frame.buffer, *self._described, *last
        noted, mine = tee(starmap(function, (call,)))
        try:
            self._in_flight.submit(noted, owners)
        finally:
            if made:
                _delete_any_size(made)
        event = next(mine)
        if not event:
            self._in_flight.owners.pop(event, None)
            raise LaunchError(_REFUSED)

    def wait(self, event: SyclEvent) -> None:
        """Return when the kernel of this event has ended."""
        self._wait(event)
        if self._in_flight.owners:
            self._in_flight.drop_ended()

    def _make_any_size(self, frame: Frame) -> list[int]:
        """Make dpctl's arguments for values of any size, and put them into the frame."""
        make = _functions().raw_argument
        made: list[int] = []
        for value in self._of_any_size:
            if make is None:
                raise ArgumentError(
                    value.argument,
                    "this dpctl passes only values of 1, 2, 4 or 8 bytes, and this one has "
                    f"{value.size}; pass a pointer to it, wait for the kernel on the CPU, or "
                    "install dpctl 0.21 or newer",
                )
            made.append(make(ctypes.addressof(frame.buffer) + value.place, value.size))
            struct.pack_into("<Q", frame.buffer, WORD * value.argument, made[-1])
        return made


_REFUSED = "with DPCTL_VERBOSITY=error in the environment dpctl shows the driver's reason"


class ArgumentError(RuntimeError):
    """An argument cannot be passed."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index
        """The argument's index."""


def _delete_any_size(made: Sequence[int]) -> None:
    for argument in made:
        _functions().delete_raw_argument(argument)
