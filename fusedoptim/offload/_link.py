"""Copies between the host and one device, on a stream of their own where the device has streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def _side_stream(device: torch.device) -> torch.Stream | None:
    """A new stream, or None if the copies of ``device`` are complete when the call returns."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return None
    return torch.Stream(device)


class Link:
    """Copies flat host buffers to tensors of a device, and back.

    Tensors given to :meth:`fetch` and :meth:`send` must stay alive and unchanged until :meth:`wait`
    for a later :meth:`mark` has returned or, for tensors of the device, until the device has passed
    :meth:`finish`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _side_stream(device)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory on the host, pinned if copies run concurrently with other work."""
        pin = self._stream is not None
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin)

    def begin(self) -> None:
        """Make later copies wait for all work submitted to the device so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream(self.device))

    def finish(self) -> None:
        """Make the device's later work wait for all copies."""
        if self._stream is not None:
            torch.accelerator.current_stream(self.device).wait_stream(self._stream)

    def mark(self) -> Any:
        """An event after all copies so far, for :meth:`wait`."""
        return None if self._stream is None else self._stream.record_event()

    @staticmethod
    def wait(event: Any) -> None:
        """Block until the copies before ``event`` are complete."""
        if event is not None:
            event.synchronize()

    def fetch(self, flat: Tensor | None, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy tensors of the device to the host.

        Args:
            flat: the buffer of which ``targets`` are consecutive views; None if they are not.
            targets: tensors on the host.
            sources: tensors on the device, with the shapes of ``targets``.
        """
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return
        with self._stream:
            if flat is not None and len(sources) > 1:
                try:
                    staged = torch.cat([source.reshape(-1) for source in sources])
                except torch.OutOfMemoryError:
                    pass  # one by one, which takes no memory
                else:
                    flat.copy_(staged, non_blocking=True)
                    return
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)

    def send(self, flat: Tensor | None, sources: list[Tensor], targets: list[Tensor]) -> None:
        """Copy tensors of the host to the device; ``flat`` is the buffer of ``sources``."""
        if self._stream is None:
            torch._foreach_copy_(targets, sources)
            return
        with self._stream:
            if flat is not None and len(targets) > 1:
                try:
                    staged = flat.to(self.device, non_blocking=True)
                except torch.OutOfMemoryError:
                    pass
                else:
                    torch._foreach_copy_(targets, views(staged, targets))
                    return
            for target, source in zip(targets, sources):
                target.copy_(source, non_blocking=True)


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive views of a flat tensor, with the shapes of ``like``."""
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like)]
