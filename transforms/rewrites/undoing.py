"""Callbacks that undo changes, as in ``contextlib.ExitStack``; an interrupted one runs again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self


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
                    self._callbacks.pop()
                raised = error
        if raised is not None:
            raise raised
