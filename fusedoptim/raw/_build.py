"""A SPIR-V module and its kernels, built by a device's driver, and their launch."""

from __future__ import annotations

import functools
import math
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusedoptim.launch.arguments import ONE_ADDRESS, Frame, Packing
from fusedoptim.launch.backend import (
    NO_TRAITS,
    BuildError,
    Compiler,
    DeviceKernel,
    LaunchError,
    Traits,
)
from fusedoptim.launch.backend import Program as BuiltProgram
from fusedoptim.launch.devices import backend_of
from fusedoptim.launch.sycl import ArgumentError, SyclKernel
from fusedoptim.raw._arguments import Signature
from fusedoptim.raw._errors import InvalidModuleError, KernelCompileError
from fusedoptim.raw._pointers import Uses
from fusedoptim.raw._spirv import ModuleFacts, read_module

Size = int | Sequence[int]
_MOST_SHAPES = 1024  # sizes that are remembered
LARGEST = 1 << 31
"""SYCL refuses launches of this many work items or more."""
# SPIR-V capabilities that some devices lack: the aspect in SYCL, the feature, and what to do.
_ASPECTS = {
    9: ("fp16", "float16 arithmetic", "compute in float, with vload_half and vstore_half"),
    10: ("fp64", "float64 arithmetic", "compute in float"),
    12: ("atomic64", "64-bit atomics", "use 32-bit ones"),
}


class Program:
    """A SPIR-V module, and the programs that drivers have built from it."""

    def __init__(self, spirv: bytes, options: Sequence[str]) -> None:
        self.spirv = spirv
        self.facts: ModuleFacts = read_module(spirv)
        self._options = " ".join(options)
        self._built: dict[Compiler, BuiltProgram] = {}
        self._lock = threading.RLock()  # a signal handler may launch a kernel in the middle

    def kernel(
        self,
        queue: Any,
        name: str,
        packing: Packing,
        by_sycl: bool = False,
        traits: Traits = NO_TRAITS,
    ) -> DeviceKernel:
        """The kernel ``name`` on a ``dpctl.SyclQueue``, built at the first call for its device.

        Args:
            queue: where the kernel runs.
            name: the kernel's name.
            packing: the packing of its arguments.
            by_sycl: whether SYCL must launch it.
            traits: the traits of its source.

        Raises:
            InvalidModuleError: the module needs a capability that the device lacks.
            KernelCompileError: the driver refuses it; the message has the driver's log.
        """
        # All launches must share the variables that keep their values between launches.
        by_sycl = by_sycl or self.facts.has_globals
        compiler = backend_of(queue).compiler(queue, by_sycl)
        with self._lock:
            if compiler not in self._built:
                device = queue.sycl_device
                check_capabilities(self.facts, device)
                try:
                    self._built[compiler] = compiler.compile(self.spirv, self._options)
                except BuildError as error:
                    raise KernelCompileError(
                        f"the driver of {device.name} does not build the module:\n"
                        f"{error.log or 'it gives no reason'}",
                        error.log,
                    ) from error
            return self._built[compiler].kernel(queue, name, packing, traits)


def check_capabilities(facts: ModuleFacts, device: Any) -> None:
    """Raise InvalidModuleError if the module needs a capability that the device lacks."""
    for number in sorted(facts.capabilities & _ASPECTS.keys()):
        aspect, what, cure = _ASPECTS[number]
        if not getattr(device, f"has_aspect_{aspect}"):
            raise InvalidModuleError(f"the module needs {what}, which {device.name} lacks; {cure}")


class Shape(NamedTuple):
    """Checked sizes of a launch."""

    is_empty: bool
    waited: Any
    """The sizes in the form for launches that are waited for."""
    items: tuple[int, ...]
    group: tuple[int, ...] | None


class Built:
    """A kernel built for one queue."""

    def __init__(
        self,
        queue: Any,
        program: Program,
        name: str,
        signature: Signature,
        traits: Traits = NO_TRAITS,
    ) -> None:
        device = queue.sycl_device
        self.queue = queue
        self._program = program
        self._name = name
        self._device = device.name
        self._required = program.facts.entries[name].local_size
        self._signature = signature
        self._takes_frame = traits.takes_frame
        packing = ONE_ADDRESS if traits.takes_frame else signature.packing
        self.waited = program.kernel(queue, name, packing, traits=traits)
        self.limits = self.waited.limits
        self._most_each = tuple(map(int, reversed(device.max_work_item_sizes3d)))
        self.local_memory = int(device.local_mem_size)
        self.on_host = backend_of(queue).runs_on_host
        self.in_order = bool(queue.is_in_order)
        self._shapes: dict[tuple[tuple[int, ...], tuple[int, ...] | None], Shape] = {}

    def shape(self, global_size: Any, local_size: Any) -> Shape:
        """The sizes, checked against the limits of the device and the kernel.

        Raises:
            TypeError: a size is neither an integer nor a sequence of integers.
            ValueError: they cannot be launched.
        """
        items = (global_size,) if type(global_size) is int else _as_size(global_size, "global_size")
        if local_size is None:
            group = None
        else:
            group = (local_size,) if type(local_size) is int else _as_size(local_size, "local_size")
        shape = self._shapes.get((items, group))
        if shape is None:
            shape = self._checked(items, group)
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[items, group] = shape
        return shape

    def _checked(self, items: tuple[int, ...], group: tuple[int, ...] | None) -> Shape:
        if any(size < 0 for size in items):
            raise ValueError(f"{self._name}: global_size={items} has a negative number")
        if math.prod(items) >= LARGEST or max(items) >= LARGEST:
            raise ValueError(
                f"{self._name}: global_size={items} are {math.prod(items):,} work items, and a "
                "launch in SYCL has fewer than 2**31; have each one compute several elements"
            )
        if group is None and self._required is not None:
            group = self._required[: len(items)]
        if group is not None:
            self._check_group(items, group)
        return Shape(0 in items, self.waited.sizes(items, group), items, group)

    def _check_group(self, items: tuple[int, ...], group: tuple[int, ...]) -> None:
        what = f"{self._name}: local_size={group}"
        if len(group) != len(items):
            raise ValueError(f"{what} and global_size={items} differ in their dimensions")
        if any(size < 1 for size in group):
            raise ValueError(f"{what} has a number below 1; None lets the driver choose")
        if self._required is not None:
            required = self._required[: len(items)]
            if group != required or math.prod(self._required) != math.prod(required):
                raise ValueError(
                    f"{what}, and the kernel's source requires {self._required} "
                    "(reqd_work_group_size)"
                )
        if any(size > most for size, most in zip(group, self._most_each)):
            raise ValueError(
                f"{what}, and {self._device} allows at most {self._most_each[: len(group)]}"
            )
        if math.prod(group) > self.limits.work_group_size:
            raise ValueError(
                f"{what} are {math.prod(group)} work items, and {self._device} allows this kernel "
                f"{self.limits.work_group_size} in a group"
            )
        if any(size % part for size, part in zip(items, group)):
            rounded = tuple(-(-size // part) * part for size, part in zip(items, group))
            groups = tuple(size * part for size, part in zip(items, group))
            raise ValueError(
                f"{self._name}: global_size={items} is not a multiple of local_size={group}; "
                f"launch {rounded}, and have the kernel return where get_global_id(0) is too "
                f"large. It counts work items: {items} groups are global_size={groups}"
            )

    @functools.cached_property
    def unwaited(self) -> SyclKernel:
        """The kernel for launches without waiting, in order with the queue's other work."""
        if isinstance(self.waited, SyclKernel):
            return self.waited
        packing = self._signature.packing
        kernel = self._program.kernel(self.queue, self._name, packing, by_sycl=True)
        assert isinstance(kernel, SyclKernel)
        return kernel

    def launch(self, shape: Shape, frame: Frame, uses: Uses, owners: list[Any] | None) -> None:
        """Submit the kernel; wait for its end, or keep the ``owners`` of its memory until then.

        A submission copies the arguments, so ``frame`` can be used again.
        """
        if owners is None:
            self.run(shape, self.prepared(frame), uses)
            return
        try:
            kernel = self.unwaited
            kernel.submit_unwaited(frame, kernel.sizes(shape.items, shape.group), owners)
        except LaunchError as error:
            raise self._refused(error) from error
        except ArgumentError as error:
            raise RuntimeError(f"{self._signature.what(error.index)}: {error}") from error

    def prepared(self, frame: Frame) -> Frame:
        """The frame to pass to :meth:`run`, with the arguments in ``frame``."""
        if self._takes_frame:
            frame = frame.as_argument()
        self.waited.prepare(frame)
        return frame

    def check(self, status: int, frame: Frame) -> None:
        """Raise if ``status``, the result of the kernel's ``at_once``, is a failure."""
        try:
            self.waited.check(status, frame)
        except LaunchError as error:
            raise self._refused(error) from error

    def run(self, shape: Shape, frame: Frame, uses: Uses) -> None:
        """Submit the kernel, and wait for its end."""
        kernel = self.waited
        if uses.queues:  # other code may have submitted work to them
            self.queue.wait()
        events: list[Any] = []
        try:
            if kernel.submit(frame, shape.waited, uses.elements, events):
                kernel.wait(events[0])
        except LaunchError as error:
            raise self._refused(error) from error
        except BaseException:
            for event in events:  # after an interrupt the kernel's memory may be freed
                kernel.wait(event)
            raise

    def _refused(self, error: LaunchError) -> RuntimeError:
        return RuntimeError(
            f"{self._name}: the driver of {self._device} refused the launch, as it does if a "
            f"kernel needs more local memory or registers than there are ({error})"
        )


def _as_size(size: Any, argument: str) -> tuple[int, ...]:
    try:
        sizes = tuple(size) if hasattr(size, "__iter__") else (size,)
        checked = tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(
            f"{argument}={size!r} is neither an integer nor a sequence of them"
        ) from None
    if not 1 <= len(checked) <= 3:
        raise ValueError(f"{argument}={size!r} has {len(checked)} dimensions; pass 1 to 3")
    return checked
