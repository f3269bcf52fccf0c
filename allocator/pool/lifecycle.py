"""What happens to pools when garbage is collected, and when the process forks or exits."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from allocator.exchange.dlpack import make_immortal

if TYPE_CHECKING:
    from allocator.pool.core import Core


_cores: weakref.WeakValueDictionary[int, Core] = weakref.WeakValueDictionary()
_of_the_parent: list[Core] = []
_sweeps: list[Callable[[], None]] = []


def register(core: Core) -> None:
    """Let a pool take part in the work at collections, forks and exit."""
    _cores[id(core)] = core


def after_collections(sweep: Callable[[], None]) -> None:
    """Let a function be called after each full garbage collection."""
    _sweeps.append(sweep)


def cores() -> list[Core]:
    """The cores of all pools alive, the oldest first."""
    # Not values(): another thread may add a pool during an iteration.
    return [core for reference in _cores.valuerefs() if (core := reference()) is not None]


def _after_collection(phase: str, info: dict[str, int]) -> None:
    """Take in what was released to pools that are no longer called."""
    if phase == "stop" and info["generation"] == 2:
        for core in cores():
            core.drain_if_idle(with_unclaimed=True)
        for sweep in _sweeps:
            sweep()


def _after_fork_in_child() -> None:
    """Leave the parent's memory alone: its driver is not running here."""
    for core in cores():
        _of_the_parent.append(core)
        core.abandon()


@atexit.register
def _at_exit() -> None:
    """Keep all memory until the process ends: some tensor may outlive the interpreter."""
    with contextlib.suppress(ValueError):  # something else has removed it
        gc.callbacks.remove(_after_collection)
    for core in cores():
        make_immortal(core)


gc.callbacks.append(_after_collection)
os.register_at_fork(after_in_child=_after_fork_in_child)
