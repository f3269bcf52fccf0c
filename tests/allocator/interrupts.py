"""KeyboardInterrupt at random moments."""

from __future__ import annotations

import gc
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.conftest import SEED


def interrupted(step: Callable[[random.Random], None], seconds: float, most: float) -> int:
    """Call ``step`` all the time, interrupted every ``most`` seconds at most; how often it was."""
    choose, interrupts, is_armed = random.Random(SEED), 0, False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal is_armed
        if is_armed:  # once, and never where the interrupt is dealt with
            is_armed = False
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    hook, sys.unraisablehook = sys.unraisablehook, lambda error: None  # one of a finalizer
    gc.freeze()  # or each collection would walk all of torch
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                is_armed = True
                signal.setitimer(signal.ITIMER_REAL, max(choose.random() * most, 1e-6))
                while is_armed:
                    step(choose)
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        gc.unfreeze()
        sys.unraisablehook = hook
    gc.collect()
    return interrupts
