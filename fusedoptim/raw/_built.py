"""A kernel built for one queue, the sizes that it can be launched with, and the launch."""

from __future__ import annotations

import ctypes
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusedoptim.allocator import queue as default_queue
from fusedoptim.launch.opencl import driver_of
from fusedoptim.raw._arguments import Frame, Signature
from fusedoptim.raw._build import Program
from fusedoptim.raw._dpctl import functions
from fusedoptim.raw._launch import SyclKernel
from fusedoptim.raw._pointers import Uses
from fusedoptim.raw._waited import WaitedKernel

Size = int | Sequence[int]
_MOST_SHAPES = 1024  # sizes that are remembered
_LARGEST = 1 << 31  # work items in all, from where SYCL refuses a launch


class Shape(NamedTuple):
    """Checked sizes of a launch, as functions in C take them."""

    is_empty: bool
    """whether there are no work items."""
    by_sycl: tuple[Any, tuple[Any, ...]]
    """dpctl's function that submits a kernel so, and its last arguments."""
    by_opencl: tuple[Any, ...]
    """the last arguments of OpenCL's function."""


class Built:
    """A kernel for one queue."""

    def __init__(self, queue: Any, program: Program, name: str) -> None:
        """Have the driver build it.

        Args:
            queue: a dpctl.SyclQueue.
            program: that has the kernel.
            name: of the kernel.

        Raises:
            InvalidModuleError: the module needs what the device lacks.
            KernelCompileError: the driver refuses it.
        """
        device = queue.sycl_device
        self.queue = queue
        self._program = program
        self._name = name
        self._device = device.name
        self._required = program.facts.entries[name].local_size
        self._waited = self._by_opencl()
        self.limits = self.by_sycl.limits if self._waited is None else self._waited.limits
        self._most_each = tuple(map(int, reversed(device.max_work_item_sizes3d)))
        self.local_memory = int(device.local_mem_size)
        self.on_host = bool(device.is_cpu)
        self.in_order = bool(queue.is_in_order)
        self._shapes: dict[tuple[tuple[int, ...], tuple[int, ...] | None], Shape] = {}

    def _by_opencl(self) -> WaitedKernel | None:
        """What launches the kernel and waits for its end, on the CPU's own queue."""
        device = self.queue.sycl_device
        if not device.is_cpu or self.queue is not default_queue("cpu"):
            return None
        if self._program.facts.has_globals:  # which launches by SYCL must see too
            return None
        driver = driver_of(device)
        if driver is None:
            return None
        program = self._program.by_opencl(driver, device)
        return WaitedKernel(driver, program, self._name, self._refusal)

    @property
    def _refusal(self) -> str:
        return (
            f"{self._name}: the driver of {self._device} refused the launch, as it does if a "
            "kernel needs more local memory or registers than there are"
        )

    def shape(self, global_size: Any, local_size: Any) -> Shape:
        """Sizes checked against what the device and the kernel allow.

        Raises:
            TypeError: a size is no integer and no sequence of them.
            ValueError: it cannot be launched so.
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
        if math.prod(items) >= _LARGEST or max(items) >= _LARGEST:
            raise ValueError(
                f"{self._name}: global_size={items} are {math.prod(items):,} work items, and a "
                "launch in SYCL has fewer than 2**31; have each one compute several elements"
            )
        if group is None and self._required is not None:
            group = self._required[: len(items)]
        if group is not None:
            self._check_group(items, group)
        nothing_to_wait_for = 0, None
        by_opencl = len(items), None, _in_c(items), _in_c(group), *nothing_to_wait_for, None
        # SYCL's last dimension is the one that OpenCL calls 0.
        sizes = [_in_c(size[::-1]) for size in (items, group) if size]
        submit = functions().submit if group is None else functions().submit_groups
        by_sycl = submit, (*sizes, len(items), None, 0)
        return Shape(0 in items, by_sycl, by_opencl)

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
            raise ValueError(
                f"{self._name}: global_size={items} is no multiple of local_size={group}; "
                f"launch {rounded}, and have the kernel return where get_global_id(0) is too large"
            )

    @functools.cached_property
    def by_sycl(self) -> SyclKernel:
        """What launches the kernel on the queue."""
        handle = self._program.by_sycl(self.queue).get_sycl_kernel(self._name)
        return SyclKernel(self.queue, handle, self._refusal)

    def launch(
        self, shape: Shape, signature: Signature, frame: Frame, uses: Uses, wait: bool, used: Any
    ) -> None:
        """Submit the kernel, and wait for its end or keep what it uses until then."""
        if wait and self._waited is not None:
            if uses.queues:  # of which SYCL may have been asked something
                self.queue.wait()
            self._waited.run(shape.by_opencl, signature, frame, uses.elements)
        else:
            self.by_sycl.launch(*shape.by_sycl, signature, frame, wait, used)
        signature.release(frame)


def _in_c(size: tuple[int, ...] | None) -> Any:
    return None if size is None else (ctypes.c_size_t * 3)(*size)


def _as_size(size: Any, argument: str) -> tuple[int, ...]:
    try:
        sizes = tuple(size) if hasattr(size, "__iter__") else (size,)
        checked = tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(
            f"{argument}={size!r} is neither an integer nor a sequence of them"
        ) from None
    if not 1 <= len(checked) <= 3:
        raise ValueError(f"{argument}={size!r} has {len(checked)} dimensions; there are 1 to 3")
    return checked
