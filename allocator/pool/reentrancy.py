"""Tells a call whether it is the outermost of nested ones, and repairs interrupted work."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class ReentrancyGuard:
    """Tells whoever holds a pool's re-entrant lock whether the call is the outermost one.

    A finalizer or a signal handler may call a pool in the middle of the pool's own work, in the
    same thread. A plain lock would deadlock there; a re-entrant one alone would let the inner call
    see and change records in an inconsistent state. ``with lock, guard as is_outermost`` tells the
    inner call to do only what is safe then.

    The lock is separate, because only a lock written in C is released whatever exception arrives
    between two instructions. KeyboardInterrupt, for example, may be raised before the first line of
    an ``__exit__`` in Python.
    """

    def __init__(self, recover: Callable[[], None]) -> None:
        """``recover``, a bound method, repairs records that an asynchronous exception left broken.

        It may itself be interrupted, and then runs again. It is held weakly, so that its object is
        freed without a garbage collection.
        """
        self._recover = weakref.WeakMethod(recover)
        self._owner: FrameType | None = None
        """the frame of the outermost block."""
        self._needs_recovery = False

    def __enter__(self) -> bool:
        frame = sys._getframe(1)
        if self._owner is not None:
            if _is_running(self._owner, frame):
                return False
            self._needs_recovery = True  # the owner's __exit__ never ran
        self._owner = frame
        if self._needs_recovery:
            recover = self._recover()
            if recover is not None:
                recover()
            self._needs_recovery = False
        return True

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._owner is not sys._getframe(1):
            return
        # A MemoryError is raised by the driver or a limit, with all records consistent.
        if error is not None and not isinstance(error, MemoryError):
            self._needs_recovery = True
        self._owner = None


def _is_running(frame: FrameType, innermost: FrameType) -> bool:
    """Whether a frame is among the callers of the innermost one."""
    caller: FrameType | None = innermost
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
