"""Forks: whether the parent's driver was running, and locks in the child."""

from __future__ import annotations

import os
import threading
from typing import Any

_runs = False
_forked = False


def check_not_forked() -> None:
    """Raise in a process forked from one whose driver was running: its threads do not exist here.

    Raises:
        RuntimeError: it is such a process; the message says what to do instead.

    Example:
        >>> check_not_forked()
    """
    if is_forked():
        raise RuntimeError(
            "this process was forked after its parent used a SYCL device, and a driver's "
            "threads do not survive a fork; start the process with the 'spawn' method: "
            "multiprocessing.set_start_method('spawn')"
        )


def note_driver_runs() -> None:
    """Note that a driver is running in this process."""
    global _runs
    _runs = True


def is_forked() -> bool:
    """Whether this process was forked from one whose driver was running.

    Example:
        >>> is_forked()
        False
    """
    return _forked


def renew_lock_in_child(module: dict[str, Any]) -> None:
    """Give a module's globals a new ``_lock`` after a fork: another thread may have held it."""
    os.register_at_fork(after_in_child=lambda: module.update(_lock=threading.RLock()))


def _after_fork_in_child() -> None:
    global _forked
    _forked = _forked or _runs


os.register_at_fork(after_in_child=_after_fork_in_child)
