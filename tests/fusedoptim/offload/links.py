"""Stand-ins for a device with streams: its copies run late, or through a staged buffer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fusedoptim.offload._link import Link


class Counted(Link):
    """A link that counts the bytes copied each way."""

    fetched = 0
    sent = 0

    def fetch(self, flat: Tensor | None, targets: list[Tensor], sources: list[Tensor]) -> None:
        Counted.fetched += sum(t.nbytes for t in targets)
        super().fetch(flat, targets, sources)

    def send(self, flat: Tensor | None, sources: list[Tensor], targets: list[Tensor]) -> None:
        Counted.sent += sum(t.nbytes for t in sources)
        super().send(flat, sources, targets)


class Late(Counted):
    """A link that copies only when something waits: what is read too early has old values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies: list[Callable[[], None]] = []

    def fetch(self, *args: Any) -> None:
        self._copies.append(lambda: super(Late, self).fetch(*args))

    def send(self, flat: Tensor | None, sources: list[Tensor], targets: list[Tensor]) -> None:
        torch.autograd.graph.increment_version(targets)  # as torch does when a copy is enqueued
        later = [target.data for target in targets]
        self._copies.append(lambda: super(Late, self).send(flat, sources, later))

    def _run(self, copies: list[Callable[[], None]]) -> None:
        while copies and copies[-1] in self._copies:
            self._copies.pop(0)()

    def mark(self) -> Any:
        return _Event(self, list(self._copies))

    def finish(self) -> None:
        self._run(list(self._copies))


class _Event:
    def __init__(self, link: Late, copies: list[Callable[[], None]]) -> None:
        self._link, self._copies = link, copies

    def synchronize(self) -> None:
        self._link._run(self._copies)


class Staged(Counted):
    """A link with copies as for a device with a stream, each of which is complete at once."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream: Any = _stream()

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def begin(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def mark(self) -> None:
        pass


class _stream(contextlib.AbstractContextManager[None]):
    def __exit__(self, *_: object) -> None:
        pass


class Short(Staged):
    """A staged link on a device that has no memory left to stage a copy."""

    def fetch(self, *args: Any) -> None:
        with _no_memory():
            super().fetch(*args)

    def send(self, *args: Any) -> None:
        with _no_memory():
            super().send(*args)


@contextlib.contextmanager
def _no_memory() -> Iterator[None]:
    def refuse(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    cat, to = torch.cat, Tensor.to
    torch.cat, Tensor.to = refuse, refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.cat, Tensor.to = cat, to  # type: ignore[method-assign]
