"""What submits a kernel whose one argument is an address: by SYCL, or by OpenCL's C interface."""

from __future__ import annotations

import ctypes
from itertools import starmap
from typing import Any, Protocol

from fusedoptim.launch.opencl import SUCCESS, Driver, Owned, check
from fusedoptim.launch.openmp import wake
from fusedoptim.launch.progress import unwaited


class Launcher(Protocol):
    """Submits a kernel whose one argument is an address."""

    def submit(self, address: int, items: int, elements: int, events: list[Any]) -> bool:
        """Submit the kernel, and add its event to ``events`` in the same call of C.

        Args:
            address: the kernel's argument.
            items: work items in all.
            elements: of the tensors that they go through, about.
            events: of this step's launches.

        Returns:
            whether it may still run.

        Raises:
            RuntimeError: the driver refuses it; then ``events`` is as it was.
        """

    def wait(self, event: Any) -> None:
        """Return when the kernel of this event has ended."""


class SyclLauncher:
    """Submits a kernel to a SYCL queue."""

    def __init__(self, queue: Any, handle: Any, lanes: int) -> None:
        """Prepare submissions.

        Args:
            queue: a dpctl.SyclQueue.
            handle: a dpctl.program.SyclKernel.
            lanes: work items in a group.
        """
        self._submit = queue.submit_async
        self._handle = handle
        self._local_size = [lanes]

    def submit(self, address: int, items: int, elements: int, events: list[Any]) -> bool:
        """See :meth:`Launcher.submit`."""
        argument = ctypes.c_int64(address)
        sizes = ([items],), (self._local_size,)
        events.extend(map(self._submit, (self._handle,), ([argument],), *sizes))
        return True

    def wait(self, event: Any) -> None:
        """Return when the kernel of this event has ended."""
        event.wait()


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
        """See :meth:`Launcher.submit`; an event is the driver's answer."""
        if address != self._set_address:
            self._set_address = None  # whatever is set if this is interrupted
            self._address.value = address
            place = ctypes.byref(self._address)
            check(self._opencl.set_argument(self._kernel.handle, 0, 8, place), "clSetKernelArg")
            self._set_address = address
        self._items[0] = items
        if unwaited.queues:  # raw kernels, which may write what this one reads
            unwaited.wait()
        driver = self._driver
        # One group uses one thread: this one has the tensors in its cache. 18 us for 22.
        at_once = items == self._lanes and driver.own_thread is not None and driver.progress.is_idle
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
