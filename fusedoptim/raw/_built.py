"""A kernel built for one queue, the sizes that it can be launched with, and the launch."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from fusedoptim._progress import unwaited
from fusedoptim.raw._arguments import Frame, Signature
from fusedoptim.raw._launch import functions, in_flight
from fusedoptim.raw._spirv import Entry

Size = int | Sequence[int]
_MOST_SHAPES = 1024  # sizes that are remembered
_LARGEST = 1 << 31  # work items in all, from where SYCL refuses a launch


class Shape(NamedTuple):
    """Checked sizes of a launch, as dpctl's C library takes them."""

    is_empty: bool
    """whether there are no work items."""
    submit: Any
    """the function that submits a kernel so."""
    arguments: tuple[Any, ...]
    """its last ones: the sizes, and that there is nothing to wait for."""


class Built:
    """A kernel for one queue."""

    def __init__(self, queue: Any, handle: Any, name: str, entry: Entry) -> None:
        device = queue.sycl_device
        self.queue = queue
        self.handle = handle
        self._queue_ref = queue.addressof_ref()
        self._kernel_ref = handle.addressof_ref()
        self._name = name
        self._device = device.name
        self._required = entry.local_size
        self._most = int(handle.work_group_size)
        self._most_each = tuple(map(int, reversed(device.max_work_item_sizes3d)))
        self.local_memory = int(device.local_mem_size)
        self.on_host = bool(device.is_cpu)
        self.in_order = bool(queue.is_in_order)
        self._shapes: dict[tuple[tuple[int, ...], tuple[int, ...] | None], Shape] = {}
        self._wait, self._delete = functions().wait, functions().delete

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
        # SYCL's last dimension is the one that OpenCL calls 0.
        sizes = [(ctypes.c_size_t * 3)(*reversed(size)) for size in (items, group) if size]
        submit = functions().submit if group is None else functions().submit_groups
        return Shape(0 in items, submit, (*sizes, len(items), None, 0))

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
        if math.prod(group) > self._most:
            raise ValueError(
                f"{what} are {math.prod(group)} work items, and {self._device} allows this kernel "
                f"{self._most} in a group"
            )
        if any(size % part for size, part in zip(items, group)):
            rounded = tuple(-(-size // part) * part for size, part in zip(items, group))
            raise ValueError(
                f"{self._name}: global_size={items} is no multiple of local_size={group}; "
                f"launch {rounded}, and have the kernel return where get_global_id(0) is too large"
            )

    def launch(
        self, shape: Shape, signature: Signature, frame: Frame, wait: bool, used: Any
    ) -> None:
        """Submit the kernel, and wait for its end or keep what it uses until then."""
        made = signature.make_raw(frame) if signature.has_raw else ()
        if self.on_host and not wait:
            unwaited.submit()
        try:
            event = shape.submit(
                self._kernel_ref,
                self._queue_ref,
                frame.buffer,
                signature.types,
                signature.count,
                *shape.arguments,
            )
            if self.on_host and not wait:
                unwaited.submit()  # again: a step may have waited for all before
            if wait and event:
                self._wait(event)
        except BaseException:
            self.queue.wait()  # an interrupt must not leave a kernel with memory that goes
            raise
        finally:
            if made:
                signature.delete_raw(made)
        signature.release(frame)
        if not event:
            raise RuntimeError(
                f"{self._name}: the driver of {self._device} refused the launch, as it does if a "
                "kernel needs more local memory or registers than there are; with "
                "DPCTL_VERBOSITY=error in the environment dpctl shows what it said"
            )
        if wait or used is None:
            self._delete(event)
        else:
            in_flight.keep(event, used)


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
