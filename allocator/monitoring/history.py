"""The history of a pool: its last events and their stacks, as torch's memory_viz shows them."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from types import CodeType, FrameType
from typing import Any

from allocator.monitoring.hooks import Hook
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.sizes import as_integer

Frames = list[dict[str, Any]]

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_DEEPEST = 64
"""most frames kept of a stack, the innermost ones."""
_MOST_STACKS = 10_000
_NO_FRAMES: Frames = []
_FIELDS = ("action", "addr", "size", "stream", "time_us", "frames")
"""An entry's fields, by torch's names."""


class Stacks:
    """Python stacks; equal ones share one list."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[list[CodeType], Frames]] = {}

    def here(self) -> Frames:
        """The stack that called this package, innermost first."""
        innermost: FrameType | None = sys._getframe(1)
        while innermost is not None and innermost.f_code.co_filename.startswith(_PACKAGE):
            innermost = innermost.f_back
        stack: list[FrameType] = []
        frame = innermost
        while frame is not None and len(stack) < _DEEPEST:
            stack.append(frame)
            frame = frame.f_back
        # Line numbers and dicts are slow to make, so they are made once for each stack. Code
        # objects are compared by id, as their hashes are slow too, and kept alive for that.
        key = tuple(number for f in stack for number in (id(f.f_code), f.f_lasti))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_STACKS:
                self._known.clear()
            codes = [f.f_code for f in stack]
            frames = [
                {"filename": code.co_filename, "line": f.f_lineno or 0, "name": code.co_name}
                for f, code in zip(stack, codes)
            ]
            known = self._known[key] = codes, frames
        return known[1]


class History(Hook):
    """The last events of a pool, and the stacks of its allocations."""

    def __init__(self, core: Core, max_entries: int, stacks: str | None) -> None:
        max_entries = as_integer(max_entries, "max_entries")
        if max_entries < 0:
            raise ValueError(f"max_entries={max_entries} is negative")
        if stacks not in ("python", None):
            raise ValueError(f"stacks={stacks!r} is neither 'python' nor None")
        self._core = core
        self._stacks = Stacks() if stacks else None
        self._entries: deque[tuple[Any, ...]] = deque(maxlen=max_entries)
        self._awaited: list[Allocation] = []
        self._streams: dict[int, int] = {}
        self.segment_frames: dict[int, Frames] = {}
        """stacks that took the segments from the driver, by address."""

    def allocated(self, pool: Any, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        self._complete_finished()
        frames = allocation.frames = self._here()
        if allocation.block is None:
            self._add("segment_alloc", allocation.address, room_of(allocation), 0, frames)
        self._add("alloc", _start(allocation), allocation.nbytes, allocation.stream, frames)

    def released(self, pool: Any, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        self._complete_finished()
        # The pool takes it back in its next call, whose stack says nothing about the release.
        nbytes, stream = allocation.nbytes, allocation.stream
        self._add("free_requested", _start(allocation), nbytes, stream, _NO_FRAMES)
        if allocation.queues:
            self._awaited.append(allocation)
        else:
            self._complete(allocation)

    def grown(self, pool: Any, address: int, nbytes: int) -> None:
        """See :class:`Hook`."""
        frames = self.segment_frames[address] = self._here()
        stream = self._streams[address] = self._stream_of_segment(address)
        self._add("segment_alloc", address, nbytes, stream, frames)

    def shrunk(self, pool: Any, address: int, nbytes: int) -> None:
        """See :class:`Hook`."""
        self.segment_frames.pop(address, None)
        stream = self._streams.pop(address, 0)
        self._add("segment_free", address, nbytes, stream, self._here())

    def out_of_memory(self, pool: Any, nbytes: int) -> bool:
        """See :class:`Hook`."""
        source = self._core.store.source
        most = source.driver.capacity if source.limit is None else source.limit
        free = max(most - source.reserved, 0)
        self._add("oom", 0, nbytes, 0, self._here(), device_free=free)
        return False

    def trace(self) -> list[dict[str, Any]]:
        """The entries, in torch's format."""
        self._complete_finished()
        entries = []
        for *fields, more in list(self._entries):
            entries.append(dict(zip(_FIELDS, fields)) | {"pool_id": (0, 0)} | more)
        return entries

    def _here(self) -> Frames:
        return _NO_FRAMES if self._stacks is None else self._stacks.here()

    def _add(
        self, action: str, address: int, nbytes: int, stream: int, frames: Frames, **more: int
    ) -> None:
        now = time.time_ns() // 1000
        self._entries.append((action, address, nbytes, stream, now, frames, more))

    def _complete_finished(self) -> None:
        """Record the releases that other queues have finished with."""
        if not self._awaited:
            return
        with self._core.lock:  # allocated() is called outside of it
            waiting = {id(allocation) for allocation, _ in list(self._core.store.awaiting)}
            awaited = self._awaited
            self._awaited = [allocation for allocation in awaited if id(allocation) in waiting]
            for allocation in awaited:
                if id(allocation) not in waiting:
                    self._complete(allocation)

    def _complete(self, allocation: Allocation) -> None:
        nbytes, stream = allocation.nbytes, allocation.stream
        self._add("free_completed", _start(allocation), nbytes, stream, _NO_FRAMES)
        if allocation.block is None:
            room = room_of(allocation)
            self._add("segment_free", allocation.address, room, stream, _NO_FRAMES)

    def _stream_of_segment(self, address: int) -> int:
        for heap in self._core.store.heaps.values():
            if any(segment.address == address for segment in heap.segments):
                return heap.number
        return 0


def room_of(allocation: Allocation) -> int:
    """Bytes that the driver gave for an allocation without a block."""
    _, room = allocation.handle
    return int(room)


def _start(allocation: Allocation) -> int:
    """The address of the allocation's block, which identifies it in a snapshot."""
    return allocation.address if allocation.block is None else allocation.block.address
