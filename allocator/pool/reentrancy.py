"""What one thread does at a time, though it may be interrupted by itself."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any


class Section:
    """Tells who holds a pool's re-entrant lock whether he is the first.

    A finalizer or a signal handler may call a pool in the middle of the pool's own work, in the
    same thread: a lock would wait for ever, and a re-entrant one lets it change what is half
    changed. ``with lock, section as is_outermost`` tells it to keep to what is safe then.

    The lock is separate, as only one written in C is released whenever an exception comes from
    outside, such as KeyboardInterrupt: Python may raise it before the first line of ``__exit__``.
    """

    def __init__(self, recover: Callable[[], None]) -> None:
        """``recover``, a method, mends what an exception from outside left.

        It may be interrupted, too. Its object, the pool, should die without a garbage collection.
        """
        self._recover = weakref.WeakMethod(recover)
        self._owner: FrameType | None = None
        """the frame of the outermost block."""
        self._is_hurt = False
        """whether something is to be mended before the next block."""

    def __enter__(self) -> bool:
        frame = sys._getframe(1)
        if self._owner is not None:
            if _is_running(self._owner, frame):
                return False
            self._is_hurt = True  # the block's __exit__ never ran
        self._owner = frame
        if self._is_hurt:
            recover = self._recover()
            if recover is not None:
                recover()
            self._is_hurt = False
        return True

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._owner is not sys._getframe(1):
            return
        # No memory is what the driver or a limit says, with everything as it was.
        if error is not None and not isinstance(error, MemoryError):
            self._is_hurt = True
        self._owner = None


def _is_running(frame: FrameType, innermost: FrameType) -> bool:
    """Whether a frame is among the callers of the innermost one."""
    caller: FrameType | None = innermost
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
