"""Who asked for memory, and when: a record that torch's memory_viz page replays."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections import deque
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from allocator.watching.hooks import Hook

if TYPE_CHECKING:
    from allocator.pool.allocation import Allocation
    from allocator.pool.pool import Pool

Frames = list[dict[str, Any]]

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEEPEST = 64
"""frames of a stack that are kept, the innermost."""
_MOST_STACKS = 10_000
_NO_FRAMES: Frames = []


class Stacks:
    """Python stacks, of which equal ones are one list."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[CodeType], Frames]] = {}

    def here(self) -> Frames:
        """The stack of whoever called this package, innermost first."""
        innermost: FrameType | None = sys._getframe(1)
        while innermost is not None and innermost.f_code.co_filename.startswith(_PACKAGE):
            innermost = innermost.f_back
        stack: list[FrameType] = []
        frame = innermost
        while frame is not None and len(stack) < _DEEPEST:
            stack.append(frame)
            frame = frame.f_back
        # Line numbers and dicts are slow to make, so that is done once for each stack. Code objects
        # are told apart by their ids, as their hashes are slow too, and kept for the ids to last.
        key = tuple(number for f in stack for number in (id(f.f_code), f.f_lasti))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_STACKS:
                self._known.clear()
            frames = [
                {
                    "filename": f.f_code.co_filename,
                    "line": f.f_lineno or 0,
                    "name": f.f_code.co_name,
                }
                for f in stack
            ]
            known = self._known[key] = [f.f_code for f in stack], frames
        return known[1]


class History(Hook):
    """The last events of a pool, and the stacks of its allocations."""

    def __init__(self, max_entries: int, stacks: str | None) -> None:
        if isinstance(max_entries, bool) or not isinstance(max_entries, int):
            raise TypeError(f"max_entries={max_entries!r} is not an integer")
        if max_entries < 0:
            raise ValueError(f"max_entries={max_entries} is negative")
        if stacks not in ("python", None):
            raise ValueError(f"stacks={stacks!r} is neither 'python' nor None")
        self._stacks = Stacks() if stacks else None
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=max_entries)
        self._awaited: list[Allocation] = []
        self._streams: dict[int, int] = {}
        self.segment_frames: dict[int, Frames] = {}
        """the stacks that took the segments from the driver, by address."""

    def allocated(self, pool: Pool, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        self._look_after_awaited(pool)
        frames = allocation.frames = self._here()
        stream = _stream_of(pool, allocation)
        if allocation.block is None:
            self._add("segment_alloc", allocation.address, _room(allocation), stream, frames)
        self._add("alloc", _start(allocation), allocation.nbytes, stream, frames)

    def released(self, pool: Pool, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        self._look_after_awaited(pool)
        stream = _stream_of(pool, allocation)
        # It comes back in the pool's next call, whoever makes it: that has no stack worth a record.
        self._add("free_requested", _start(allocation), allocation.nbytes, stream, _NO_FRAMES)
        if allocation.queues:
            self._awaited.append(allocation)
        else:
            self._complete(pool, allocation)

    def grown(self, pool: Pool, address: int, nbytes: int) -> None:
        """See :class:`Hook`."""
        frames = self.segment_frames[address] = self._here()
        stream = self._streams[address] = _stream_of_segment(pool, address)
        self._add("segment_alloc", address, nbytes, stream, frames)

    def shrunk(self, pool: Pool, address: int, nbytes: int) -> None:
        """See :class:`Hook`."""
        self.segment_frames.pop(address, None)
        stream = self._streams.pop(address, 0)
        self._add("segment_free", address, nbytes, stream, self._here())

    def out_of_memory(self, pool: Pool, nbytes: int) -> bool:
        """See :class:`Hook`."""
        source = pool._store.source
        most = pool.driver.capacity if source.limit is None else source.limit
        free = max(most - source.reserved, 0)
        self._add("oom", 0, nbytes, 0, self._here(), device_free=free)
        return False

    def trace(self, pool: Pool) -> list[dict[str, Any]]:
        """The entries, in torch's format."""
        self._look_after_awaited(pool)
        entries = []
        for action, address, nbytes, stream, time_us, frames, more in list(self._entries):
            entry = {
                "action": action,
                "addr": address,
                "size": nbytes,
                "stream": stream,
                "time_us": time_us,
                "frames": frames,
                "pool_id": (0, 0),
            }
            entries.append(entry | more)
        return entries

    def _here(self) -> Frames:
        return _NO_FRAMES if self._stacks is None else self._stacks.here()

    def _add(
        self, action: str, address: int, nbytes: int, stream: int, frames: Frames, **more: int
    ) -> None:
        now = time.time_ns() // 1000
        self._entries.append((action, address, nbytes, stream, now, frames, more))

    def _look_after_awaited(self, pool: Pool) -> None:
        """Record that other queues are done with memory."""
        if not self._awaited:
            return
        with pool._lock:
            waiting = {id(allocation) for allocation, _ in pool._store._awaiting}
            for allocation in self._awaited:
                if id(allocation) not in waiting:
                    self._complete(pool, allocation)
            self._awaited = [a for a in self._awaited if id(a) in waiting]

    def _complete(self, pool: Pool, allocation: Allocation) -> None:
        stream = _stream_of(pool, allocation)
        self._add("free_completed", _start(allocation), allocation.nbytes, stream, _NO_FRAMES)
        if allocation.block is None:
            room = _room(allocation)
            self._add("segment_free", allocation.address, room, stream, _NO_FRAMES)


def with_history(snapshot: dict[str, Any], pool: Pool, history: History | None) -> dict[str, Any]:
    """A snapshot of segments with what else torch's has."""
    snapshot["segments"] += [_segment_of(allocation) for allocation in _alone(pool)]
    if history is not None:
        snapshot["device_traces"] = [history.trace(pool)]
        for segment in snapshot["segments"]:
            segment["frames"] = history.segment_frames.get(segment["address"], segment["frames"])
    snapshot["allocator_settings"] = {
        "backend": "fusedoptim.allocator",
        "device": pool.driver.name,
        "kind": pool.kind,
        "pool": pool.name,
        "limit": pool.limit,
        "expandable_segments": False,
        "max_split_size": -1,
        **dataclasses.asdict(pool._rules),
    }
    return snapshot


def _alone(pool: Pool) -> list[Allocation]:
    """Allocations whose memory is a segment of no heap."""
    store = pool._store
    active = [*store.in_use.values(), *(allocation for allocation, _ in store._awaiting)]
    return [allocation for allocation in active if allocation.block is None]


def _segment_of(allocation: Allocation) -> dict[str, Any]:
    nbytes, room = allocation.nbytes, _room(allocation)
    state = "active_allocated" if allocation.is_in_use else "active_pending_free"
    blocks = [
        {
            "address": allocation.address,
            "size": nbytes,
            "requested_size": nbytes,
            "state": state,
            "frames": allocation.frames,
        },
        {
            "address": allocation.address + nbytes,
            "size": room - nbytes,
            "requested_size": 0,
            "state": "inactive",
            "frames": [],
        },
    ]
    return {
        "device": 0,
        "address": allocation.address,
        "total_size": room,
        "allocated_size": nbytes if allocation.is_in_use else 0,
        "active_size": nbytes,
        "requested_size": nbytes if allocation.is_in_use else 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": allocation.frames,
        "blocks": blocks,
    }


def _room(allocation: Allocation) -> int:
    """Bytes that the driver gave for an allocation alone."""
    _, room = allocation.handle
    return int(room)


def _start(allocation: Allocation) -> int:
    """The address of its block, by which a snapshot knows it."""
    return allocation.address if allocation.block is None else allocation.block.address


def _stream_of(pool: Pool, allocation: Allocation) -> int:
    """The number that the snapshot has for the queue of an allocation's heap."""
    for number, heap in enumerate(pool._store.heaps.values()):
        if heap is allocation.heap:
            return number
    return 0


def _stream_of_segment(pool: Pool, address: int) -> int:
    for number, heap in enumerate(pool._store.heaps.values()):
        if any(segment.address == address for segment in heap.segments):
            return number
    return 0
