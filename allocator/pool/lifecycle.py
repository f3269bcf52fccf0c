"""What happens to pools when garbage is collected, the process forks, or it exits."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import weakref
from typing import TYPE_CHECKING

from allocator.exchange.dlpack import make_immortal

if TYPE_CHECKING:
    from allocator.pool.core import Core


# A dict of references, as another thread may add to a WeakSet while one reads it.
_cores: dict[int, weakref.ref[Core]] = {}
_of_the_parent: list[Core] = []


def register(core: Core) -> None:
    """Include a pool in what is done at collections, forks and exit."""
    key = id(core)
    _cores[key] = weakref.ref(core, lambda reference: _forget(key, reference))


def _forget(key: int, reference: weakref.ref[Core]) -> None:
    if _cores.get(key) is reference:  # not another pool's at the same address
        del _cores[key]


def cores() -> list[Core]:
    """The cores of all pools alive, the oldest first."""
    alive = (reference() for reference in list(_cores.values()))
    return [core for core in alive if core is not None]


def _after_collection(phase: str, info: dict[str, int]) -> None:
    """Take in what was released to pools that are no longer called."""
    if phase == "stop" and info["generation"] == 2:
        for core in cores():
            core.drain_if_idle(with_unclaimed=True)


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
