"""Launches on a SYCL queue."""

from __future__ import annotations

import atexit
import collections
import threading
from typing import Any

from fusedoptim.allocator import is_forked
from fusedoptim.launch.opencl import Limits
from fusedoptim.launch.progress import unwaited
from fusedoptim.raw._arguments import Frame, Signature
from fusedoptim.raw._dpctl import COMPLETE, functions


class SyclKernel:
    """A kernel that is launched on a SYCL queue, its end waited for or not."""

    def __init__(self, queue: Any, handle: Any, refusal: str) -> None:
        """Prepare launches.

        Args:
            queue: a dpctl.SyclQueue.
            handle: a dpctl.program.SyclKernel.
            refusal: what an error says where the driver refuses a launch.
        """
        self.handle = handle
        self.limits = Limits(
            int(handle.work_group_size),
            int(handle.preferred_work_group_size_multiple),
            int(handle.private_mem_size),
        )
        self._queue = queue
        self._queue_ref = queue.addressof_ref()
        self._kernel_ref = handle.addressof_ref()
        self._on_host = bool(queue.sycl_device.is_cpu)
        self._refusal = refusal
        self._wait, self._delete = functions().wait, functions().delete

    def launch(
        self,
        submit: Any,
        sizes: tuple[Any, ...],
        signature: Signature,
        frame: Frame,
        wait: bool,
        used: Any,
    ) -> None:
        """Submit the kernel, and wait for its end or keep ``used`` (None: nothing) until then."""
        made = signature.make_raw(frame) if signature.has_raw else ()
        if self._on_host:
            unwaited.wait_elsewhere(self._queue)
            if not wait:
                unwaited.submit(self._queue)
        try:
            event = submit(
                self._kernel_ref,
                self._queue_ref,
                frame.buffer,
                signature.types,
                signature.count,
                *sizes,
            )
            if self._on_host and not wait:
                unwaited.submit(self._queue)  # again: a step may have waited for all before
            if wait and event:
                self._wait(event)
            if used is not None and event:
                in_flight.keep(event, used)
        except BaseException:
            self._queue.wait()  # an interrupt must not leave a kernel with memory that goes
            raise
        finally:
            if made:
                signature.delete_raw(made)
        if not event:
            raise RuntimeError(
                f"{self._refusal}; with DPCTL_VERBOSITY=error in the environment dpctl shows what "
                "it said"
            )
        if used is None:
            self._delete(event)


class InFlight:
    """The memory that launches which nobody waits for still use."""

    def __init__(self) -> None:
        self._kept: collections.deque[tuple[int, Any]] = collections.deque()
        self._lock = threading.Lock()

    def keep(self, event: int, used: Any) -> None:
        """Keep ``used`` until the event has happened and another launch is kept."""
        self._kept.append((event, used))
        if not self._lock.acquire(blocking=False):
            return  # another thread looks
        try:
            while self._kept and functions().status(self._kept[0][0]) == COMPLETE:
                functions().delete(self._kept.popleft()[0])
        finally:
            self._lock.release()

    def wait(self) -> None:
        """Wait for all launches that are kept."""
        while self._kept and not is_forked():
            event, _ = self._kept.popleft()
            functions().wait(event)
            functions().delete(event)


in_flight = InFlight()
atexit.register(in_flight.wait)  # before the memory that they use goes
