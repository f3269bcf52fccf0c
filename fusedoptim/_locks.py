"""Locks that a forked child can take, though another thread of its parent held them."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """A reentrant lock that is free in a forked child, unless the forking thread holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _free_in_child() -> None:
    for lock in _locks:
        if not lock._is_owned():  # its holder does not exist here
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_in_child)
