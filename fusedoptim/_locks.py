"""Locks that a forked child can take, though another thread of its parent held them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """A reentrant lock that is free in a forked child, unless the forking thread holds it."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def is_held(lock: threading.RLock) -> bool:
    """Whether this thread holds a lock."""
    # threading.Condition asks in the same way.
    held: bool = lock._is_owned()  # type: ignore[attr-defined]  # typeshed lacks it
    return held


def refuse_nested(optimizer: Any, call: str) -> NoReturn:
    """Raise, as ``call`` came in the middle of a step or a load."""
    raise RuntimeError(
        f"{type(optimizer).__name__}: {call}() was called in the middle of a step or a load of "
        "the same optimizer, as by a signal handler; call it when that has returned"
    )


@contextlib.contextmanager
def between_steps(optimizer: Any, call: str) -> Iterator[None]:
    """Hold an optimizer's lock, unless it is in the middle of a step.

    Hooks of a load may ask for a state_dict, though it is the same thread that holds the lock.
    """
    if is_held(optimizer._lock) and not optimizer._is_between_steps:
        refuse_nested(optimizer, call)
    with optimizer._lock:
        is_outermost = not optimizer._is_between_steps
        optimizer._is_between_steps = True
        try:
            yield
        finally:
            if is_outermost:
                # Not set to False: an optimizer that was converted must become torch's again.
                del optimizer._is_between_steps


def _free_in_child() -> None:
    for lock in _locks:
        if not is_held(lock):  # its holder does not exist here
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_in_child)
