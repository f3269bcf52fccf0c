"""Callbacks that undo changes, as in ``contextlib.ExitStack``; an interrupted one runs again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from fusedoptim._torch_private import remove_hooks

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on


class Undo:
    """Undoes changes, the last first, when its ``with`` block ends, unless they are kept."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], object]] = []

    def callback(self, undo: Callable[..., object], *args: Any) -> None:
        """Add a callback. It can be repeated, and may be called before the change was made."""
        self._callbacks.append(partial(undo, *args))

    def nested(self) -> Undo:
        """A part of the changes, which can be undone alone."""
        inner = Undo()
        self.callback(inner.close)
        return inner

    def close(self) -> None:
        """Undo. After an error or an interrupt, another call begins with the same callback."""
        while self._callbacks:
            self._callbacks[-1]()
            self._callbacks.pop()

    def keep(self) -> None:
        """Keep all changes."""
        self._callbacks = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        raised: BaseException | None = None
        while self._callbacks:
            try:
                self.close()
            except BaseException as error:  # an interrupt, most likely
                if raised is not None:  # the rest must be undone, whatever this callback does
                    del self._callbacks[-1:]
                raised = error
        if raised is not None:
            raise raised


def changes_to(model: nn.Module) -> Undo:
    """The changes of a call that rewrites a model; undoing them also removes new hooks."""
    undo = Undo()
    undo.callback(remove_hooks, model, RemovableHandle.next_id)
    return undo
