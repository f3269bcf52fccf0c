"""The reuse cache: released tensors, kept ready to be handed out again unchanged.

A tensor of the same shape and dtype needs no change to the block records or to the struct that
torch reads. In a loop it even replaces the tensor released last without a look at the records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from allocator.exchange.exports import IDLE, IN_USE, NAME_ADDRESS, NOT_RELEASED, Export
from allocator.pool.allocation import Allocation

_MOST_CACHED = 8
"""cached tensors of one shape and dtype."""
_MOST_RECENT = 8
"""tensors of one shape and dtype that are checked for having been released."""
_MOST_ENTRIES = 1000


class _Never:
    """Stands for an export that is never released."""

    words, first = memoryview(bytes([IDLE])), 0


_NEVER: Any = _Never()


class Entry:
    """The tensors of one shape and dtype."""

    __slots__ = (
        "before_last",
        "cached",
        "is_closed",
        "is_small",
        "last",
        "recent",
        "requested",
        "reused",
        "size",
    )

    def __init__(self, size: int, requested: int, is_small: bool) -> None:
        self.cached: list[Export] = []
        """idle exports, whose blocks are freed as soon as the pool would have to grow."""
        self.recent: list[Export] = []
        """exports handed out last, each once; some may have been released since."""
        self.last: Export = _NEVER
        """the export handed out last."""
        self.before_last: Export = _NEVER
        """the export before ``last``; ``x = pool.empty(n)`` in a loop releases it, not ``last``."""
        self.reused = 0
        """tensors handed out since the counters were brought up to date."""
        self.is_closed = False
        """whether the cache has forgotten the entry."""
        self.size = size
        """bytes of each block."""
        self.requested = requested
        """bytes of each tensor."""
        self.is_small = is_small
        """whether the blocks lie in segments for small ones; only those are cached."""

    def add_recent(self, export: Export) -> None:
        """Check this export first from now on."""
        export.entry = self
        if len(self.recent) >= _MOST_RECENT:
            del self.recent[0]
        self.recent.append(export)
        self.before_last, self.last = self.last, export

    def reuse(self) -> Export | None:
        """Hand out a tensor that was released; no lock is needed."""
        for export in self.recent:
            words, first, is_taken = export.words, export.first, False
            if self.is_closed:  # another thread ran when the loop jumped back
                return None
            # On one line, as a debugger may let other threads run between two. They may have made
            # another tensor of it meanwhile.
            if words[first] not in NOT_RELEASED and export.entry is self: words[first], is_taken = IN_USE, True  # noqa: E501, E701  # fmt: skip
            if is_taken:
                export.capsule_name[0] = NAME_ADDRESS
                self.before_last, self.last = self.last, export
                self.reused += 1
                return export
        return None

    def close(self) -> None:
        """Hand out no more tensors; the pool frees the cached ones."""
        self.is_closed = True
        self.recent, self.last, self.before_last = [], _NEVER, _NEVER

    def fits(self, allocation: Allocation) -> bool:
        """Whether its blocks have this allocation's size; in a reservation they may be smaller."""
        return (self.size, self.is_small) == (allocation.size, allocation.is_small)

    def forget(self, export: Export) -> None:
        """Neither hand out nor cache an export, which may become another tensor."""
        if self.last is export:
            self.last = _NEVER
        if self.before_last is export:
            self.before_last = _NEVER
        for exports in (self.recent, self.cached):
            if export in exports:
                exports.remove(export)


class ReuseCache:
    """The entries of a pool; only one thread at a time may change them."""

    def __init__(self) -> None:
        self.by_dtype: dict[Any, dict[Any, Entry]] = {}
        """the entries, by dtype and shape; a shape of one dimension is also there as an integer."""
        self.count = 0
        """cached tensors."""
        self._all: list[Entry] = []

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._all)

    @property
    def is_full(self) -> bool:
        """Whether it should be cleared before an entry is added."""
        return len(self._all) >= _MOST_ENTRIES

    def entry_for(self, shape: tuple[int, ...], dtype: Any, allocation: Allocation) -> Entry:
        """The entry of a shape and dtype, with blocks of this allocation's size."""
        entries = self.by_dtype.setdefault(dtype, {})
        entry = entries.get(shape)
        if entry is not None and not entry.fits(allocation):
            entry.close()
            entry = None
        if entry is None:
            entry = Entry(allocation.size, allocation.nbytes, allocation.is_small)
            self._all.append(entry)  # first, or an entry that is found might never be cleared
            entries[shape] = entry
            if len(shape) == 1:
                entries[shape[0]] = entry
        return entry

    def find(self, shape: tuple[int, ...], dtype: Any) -> Entry | None:
        """The entry of a shape and dtype, if there is one."""
        return self.by_dtype.get(dtype, {}).get(shape)

    def take(self, entry: Entry) -> Export | None:
        """A cached tensor, still idle."""
        if not entry.cached:
            return None
        self.count -= 1
        return entry.cached.pop()

    def put(self, export: Export) -> None:
        """Cache a tensor."""
        entry = export.entry
        entry.forget(export)  # or it would be among the recent ones twice when handed out again
        entry.cached.append(export)
        self.count += 1

    def has_room_for(self, export: Export) -> bool:
        """Whether a tensor may be cached."""
        entry = export.entry
        if entry is None or entry.is_closed or not entry.is_small:
            return False
        return len(entry.cached) < _MOST_CACHED

    def clear(self) -> list[Entry]:
        """Forget all entries; the caller frees what they hold."""
        for entry in self._all:
            entry.close()  # first, so that nothing is handed out if we are interrupted
        gone, self._all = self._all, []
        self.count = 0
        self.by_dtype.clear()
        return gone
