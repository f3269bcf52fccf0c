"""What was submitted to a queue and may still run.

Other launches wait for it, and the memory that it uses is kept until it has ended.

This is tracked without asking the driver: waiting for an idle queue costs more than a small kernel
(see docs/design/cached-programs.md). Other threads may submit meanwhile, and an interrupt may come
anywhere, so what is not known to have ended counts as running.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fusedoptim.allocator import is_forked


class Progress:
    """Marks the latest submission to a queue and the latest one that is known to have ended.

    Whoever submits sets :attr:`latest` to a new object just before and again just after. Once is
    not enough: between the mark and the submission, another thread may wait until all earlier
    submissions have ended, and take the mark for ended too.
    """

    def __init__(self) -> None:
        self.latest = self.ended = object()

    def wait(self, by: Callable[[], object]) -> bool:
        """Let ``by`` wait for all that was submitted until now; False if it had ended already."""
        latest = self.latest
        if latest is self.ended:
            return False
        by()
        self.ended = latest
        return True


class Event(Protocol):
    """The end of one launch."""

    @property
    def has_ended(self) -> bool:
        """Whether the kernel has ended."""


on_host: dict[Any, InFlight] = {}
"""For each queue, the kernels that nobody has waited for and that may use the host's memory."""
_elsewhere: dict[Any, InFlight] = {}


class InFlight:
    """Launches on one SYCL queue that nobody waits for, and the memory that they use.

    There is one object for a queue (:func:`in_flight_on`). Waiting for the queue through it frees
    that memory. If the user waits for the queue directly, the next launch on it frees the memory.
    """

    def __init__(self, queue: Any, is_ordered: bool) -> None:
        self._queue = queue
        self.is_ordered = is_ordered
        """Whether kernels on other queues must not start before these end, as they may use the same
        memory: true of the host's."""
        self._register = on_host if is_ordered else _elsewhere
        self.owners: dict[Any, Any] = {}
        """For each launch, by its event: the owners of the memory that it uses."""

    def submit(self, events: Iterable[Any], owners: Any) -> None:
        """Take one event from an iterator that submits the launch; keep ``owners`` until it ends.

        One C call submits the launch and notes it, so an interrupt comes before both or after both.
        """
        self._register[self._queue] = self
        self.owners.update(zip(events, (owners,)))
        self._register[self._queue] = self  # again: another thread may have waited meanwhile

    def drop_ended(self) -> None:
        """Free the memory of launches that have ended, up to the first that still runs."""
        for event in list(self.owners):
            if not event.has_ended:
                return
            self.owners.pop(event, None)

    def wait(self) -> None:
        """Return when all launches until now have ended, and free their memory."""
        launched = list(self.owners)
        self._queue.wait()
        for event in launched:
            self.owners.pop(event, None)
        if not self.owners:  # another thread that adds one registers this again
            self._register.pop(self._queue, None)


_all: weakref.WeakValueDictionary[Any, InFlight] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # a signal handler may launch a kernel in the middle


def in_flight_on(queue: Any, is_ordered: bool) -> InFlight:
    """What is in flight on a queue; see :class:`InFlight` for the arguments."""
    with _lock:
        found = _all.get(queue)
        if found is None:
            found = _all[queue] = InFlight(queue, is_ordered)
        return found


def wait_for_host(but_for: InFlight | None = None) -> None:
    """Wait for the kernels that use host memory and that nobody waits for, except one queue's."""
    for in_flight in list(on_host.values()):
        if in_flight is not but_for:
            in_flight.wait()


def _wait_for_all() -> None:
    for in_flight in [*on_host.values(), *_elsewhere.values()]:
        if not is_forked():
            in_flight.wait()


atexit.register(_wait_for_all)  # before the memory that they use is freed
