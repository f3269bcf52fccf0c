"""What a kind of device is to a launch.

A new kind of device is one file with a subclass of :class:`Backend`, and one line in
:mod:`fusedoptim.launch.devices`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from fusedoptim.launch.modules import Module


class LaunchShape(NamedTuple):
    """How a kernel is spread over a device. docs/design/launch-shape.md has the measurements."""

    lanes: int
    """Work items in a work-group."""
    chunk: int
    """The most elements in a row."""
    elements_per_group: int
    """Elements that a work-group walks: it takes several rows that are shorter than that."""


class Launcher(Protocol):
    """Submits a kernel whose one argument is an address."""

    def submit(self, address: int, items: int, elements: int, events: list[Any]) -> bool:
        """Submit the kernel, and append its event to ``events`` in the same C call.

        Args:
            address: the kernel's argument.
            items: work items in all.
            elements: about how many elements the kernel goes through.
            events: of the update's launches so far.

        Returns:
            whether the kernel may still be running.

        Raises:
            RuntimeError: the driver refuses the launch; then ``events`` has not changed.
        """

    def wait(self, event: Any) -> None:
        """Return when the kernel of this event has ended."""


class Backend(abc.ABC):
    """One kind of device."""

    torch_type: str
    """Its ``torch.device.type``."""
    shape: LaunchShape
    runs_on_host: bool
    """Whether kernels use host memory, so that a step waits for their end."""

    @abc.abstractmethod
    def drives(self, sycl_device: Any) -> bool:
        """Whether a ``dpctl.SyclDevice`` is of this kind."""

    @abc.abstractmethod
    def queue(self, device: torch.device) -> Any:
        """The ``dpctl.SyclQueue`` on which tensors of ``device`` are updated now."""

    @abc.abstractmethod
    def build(self, queue: Any, module: Module) -> Callable[[], Launcher]:
        """Have the driver compile ``module``; returns what makes a launcher of its kernel.

        Raises:
            BuildError: the driver refuses the module.
        """
