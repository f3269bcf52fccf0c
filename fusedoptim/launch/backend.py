"""The interface of a kind of device.

Launching on a new kind of device takes one file with a subclass of :class:`Backend`, and one line
in :mod:`fusedoptim.launch.devices`. CONTRIBUTING.md says what else it takes.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fusedoptim.launch.arguments import Frame, Packing

if TYPE_CHECKING:
    import torch


class LaunchShape(NamedTuple):
    """How a kernel is spread over a device. docs/design/launch-shape.md has the measurements."""

    lanes: int
    """Work items in a work-group."""
    chunk: int
    """The largest number of elements in a row: a multiple of those in ``lanes`` blocks of 8-bit
    state."""
    elements_per_group: int
    """Elements that a work-group walks: several rows, if a row is shorter."""
    sub_group: int | None = None
    """The size of the sub-groups of a work-group with ``lanes``; None if the driver chooses."""


class BuildError(Exception):
    """A driver refuses a module."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log
        """The driver's text; "" if it says nothing."""


class LaunchError(RuntimeError):
    """A driver refuses a launch."""


class Limits(NamedTuple):
    """The limits of one kernel on a device."""

    work_group_size: int
    """The largest number of work items in a group."""
    preferred_work_group_size_multiple: int
    """A group's size should be a multiple of this."""
    private_mem_size: int
    """Bytes that each work item needs."""


class DeviceKernel(Protocol):
    """A compiled kernel that can be launched on one queue."""

    @property
    def limits(self) -> Limits:
        """What the device allows this kernel."""

    def sizes(self, items: tuple[int, ...], group: tuple[int, ...] | None) -> Any:
        """The sizes of a launch for :meth:`submit`: work items in all, and in a group.

        Both have 1 to 3 dimensions. If ``group`` is None, the driver chooses.
        """

    def prepare(self, frame: Frame) -> None:
        """Take over the arguments in ``frame``. Call this whenever they have changed."""

    def at_once(self, frame: Frame, sizes: Any, elements: int) -> Callable[[], int] | None:
        """A function that runs the kernel to its end on the calling thread and torch's threads.

        None if the kernel must be submitted. The arguments are those of :meth:`submit`; call the
        function before any of them changes. It returns a status for :meth:`check`.
        """

    def check(self, status: int, frame: Frame) -> None:
        """Raise if a launch of :meth:`at_once` has failed; a LaunchError if nothing has run."""

    def submit(self, frame: Frame, sizes: Any, elements: int, events: list[Any]) -> bool:
        """Submit the kernel, and append its event to ``events`` in the same C call.

        So the event is in the list if and only if the kernel runs, whatever interrupts this method.

        Args:
            frame: the arguments, which were prepared.
            sizes: the result of :meth:`sizes`.
            elements: about how many elements the kernel goes through.
            events: the events of the launches so far.

        Returns:
            whether the kernel may still be running.

        Raises:
            LaunchError: the driver refuses the launch; then ``events`` has not changed.
        """

    def wait(self, event: Any) -> None:
        """Return when the kernel of this event has ended."""


class Traits(NamedTuple):
    """What is known about a kernel's source."""

    is_short: bool = False
    """Whether one group takes little time and little memory of its own, so that it may run on the
    calling thread while other Python threads wait."""
    is_divisible: bool = False
    """Whether a launch may be cut into parts: the kernel has one dimension, and a group's number is
    ``get_group_id(0) + get_global_offset(1)``."""
    takes_frame: bool = False
    """Whether the kernel has one parameter, the address of the :class:`Frame` with its arguments.
    This saves time: every argument costs the driver time in each launch, and more if it has
    changed. The launch must then be waited for."""
    is_light: bool = False
    """Whether an element takes less time than in a step: it is read, and neither written nor passed
    to a function such as ``exp``."""


NO_TRAITS = Traits()
"""The traits of a user's kernel."""


class Program(Protocol):
    """A module that a driver has compiled."""

    def kernel(
        self, queue: Any, name: str, packing: Packing, traits: Traits = NO_TRAITS
    ) -> DeviceKernel:
        """The kernel ``name`` on a ``dpctl.SyclQueue`` of the program's device."""


class Compiler(Hashable, Protocol):
    """A driver's compiler for one device. Programs of equal compilers serve the same queues."""

    def compile(self, spirv: bytes, options: str = "") -> Program:
        """Compile a module; raise a :class:`BuildError` if the driver refuses it."""


class Backend(abc.ABC):
    """One kind of device."""

    torch_type: str
    """The ``torch.device.type`` of its devices."""
    shape: LaunchShape
    runs_on_host: bool
    """Whether kernels use the host's memory, so that a step waits for their end."""

    @abc.abstractmethod
    def drives(self, sycl_device: Any) -> bool:
        """Whether a ``dpctl.SyclDevice`` is of this kind."""

    @abc.abstractmethod
    def devices(self) -> Sequence[torch.device]:
        """The torch devices of this kind."""

    @abc.abstractmethod
    def queue(self, device: torch.device) -> Any:
        """The ``dpctl.SyclQueue`` on which tensors of ``device`` are updated now."""

    @abc.abstractmethod
    def compiler(self, queue: Any, by_sycl: bool = False) -> Compiler:
        """The compiler for the device of ``queue``.

        Args:
            queue: the queue on which kernels will run.
            by_sycl: whether SYCL must launch the kernels: their launches are not waited for, and
                others wait for the queue; or they share variables with such kernels.
        """
