"""Restores signal handlers that a library replaces when it is loaded.

Intel's CPU driver of 2026 is built on LLVM, which installs handlers for 15 signals. Job schedulers
use SIGUSR1 to tell a training run to save a checkpoint; the signal would no longer reach Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Iterator

_SIZE = 256  # bytes, more than any system's struct sigaction


@contextlib.contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Restore the previous signal handlers at the end of the block."""
    sigaction = ctypes.CDLL(None).sigaction
    sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

    def actions() -> dict[int, bytes]:
        found = {}
        for number in signal.valid_signals():
            action = ctypes.create_string_buffer(_SIZE)
            if sigaction(number, None, action) == 0:
                found[int(number)] = action.raw
        return found

    before = actions()
    try:
        yield
    finally:
        for number, action in actions().items():
            if action != before[number]:
                sigaction(number, before[number], None)
