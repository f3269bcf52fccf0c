"""What becomes of pools when the garbage collector runs, the process forks, or it ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import weakref
from typing import TYPE_CHECKING

from allocator.exchange.dlpack import make_immortal

if TYPE_CHECKING:
    from allocator.pool.pool import Pool

# A dict of references, as another thread may add to a WeakSet while one reads it.
_pools: dict[int, weakref.ref[Pool]] = {}
_of_the_parent: list[Pool] = []


def watch(pool: Pool) -> None:
    """Look after ``pool`` from now on."""
    key = id(pool)
    _pools[key] = weakref.ref(pool, lambda reference: _forget(key, reference))


def _forget(key: int, reference: weakref.ref[Pool]) -> None:
    if _pools.get(key) is reference:  # not another pool's at the same address
        del _pools[key]


def pools() -> list[Pool]:
    """All that are alive, the oldest first."""
    alive = (reference() for reference in list(_pools.values()))
    return [pool for pool in alive if pool is not None]


def _after_collection(phase: str, info: dict[str, int]) -> None:
    """Take in what pools that nobody calls any more have got back."""
    if phase == "stop" and info["generation"] == 2:
        for pool in pools():
            pool._drain_if_idle(with_unclaimed=True)


def _after_fork_in_child() -> None:
    """Leave the parent's memory alone: its driver is not here."""
    for pool in pools():
        _of_the_parent.append(pool)
        pool._abandon()


@atexit.register
def _at_exit() -> None:
    """Keep all memory until the process is gone: a tensor in some corner may outlive us."""
    with contextlib.suppress(ValueError):  # someone else has removed it
        gc.callbacks.remove(_after_collection)
    for pool in pools():
        make_immortal(pool)


gc.callbacks.append(_after_collection)
os.register_at_fork(after_in_child=_after_fork_in_child)
