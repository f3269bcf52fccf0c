"""Tensors that came back, ready to be given again as they are.

The books and the struct that torch reads need no change for a tensor of the same shape and dtype.
In a loop it even takes the place of the one just released with no look at the books at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from allocator.exchange.exports import AT_REST, GIVEN, NAME_ADDRESS, NOT_BACK, Export

if TYPE_CHECKING:
    from allocator.pool.allocation import Allocation

_MOST_READY = 8
"""tensors of one shape and dtype that stay ready."""
_MOST_GIVEN = 8
"""tensors of one shape and dtype that are looked at, whether they came back."""
_MOST_SHELVES = 1000


class _Never:
    """In the place of an export that does not exist: it never comes back."""

    words, first = memoryview(bytes([AT_REST])), 0


_NEVER: Any = _Never()


class Shelf:
    """Those of one shape and dtype."""

    __slots__ = (
        "before_last",
        "given",
        "is_gone",
        "is_small",
        "last",
        "ready",
        "requested",
        "reused",
        "size",
    )

    def __init__(self, size: int, requested: int, is_small: bool) -> None:
        self.ready: list[Export] = []
        """at rest; their memory is free for others as soon as the pool would have to grow."""
        self.given: list[Export] = []
        """those given last that may have come back, though nobody has looked yet; each once."""
        self.last: Export = _NEVER
        """given last."""
        self.before_last: Export = _NEVER
        """given before that; ``x = pool.empty(n)`` in a loop lets go of it, not of the last."""
        self.reused = 0
        """times that one was given again just as it came back."""
        self.is_gone = False
        """whether the pool has forgotten the shelf."""
        self.size = size
        """bytes of each one's block."""
        self.requested = requested
        """bytes of each."""
        self.is_small = is_small
        """whether the blocks are of segments for small ones; large ones do not stay ready."""

    def gave(self, export: Export) -> None:
        """Look at this export first from now on."""
        export.shelf = self
        if len(self.given) >= _MOST_GIVEN:
            del self.given[0]
        self.given.append(export)
        self.before_last, self.last = self.last, export

    def again(self) -> Export | None:
        """One that came back, given again; no lock is needed."""
        for export in self.given:
            words, first, is_taken = export.words, export.first, False
            if self.is_gone:  # another thread was here at the loop's last turn
                return None
            # In one line, as a debugger may let other threads run between two. They may have made
            # another tensor of it meanwhile.
            if words[first] not in NOT_BACK and export.shelf is self: words[first], is_taken = GIVEN, True  # noqa: E501, E701  # fmt: skip
            if is_taken:
                export.capsule_name[0] = NAME_ADDRESS
                self.before_last, self.last = self.last, export
                self.reused += 1
                return export
        return None

    def close(self) -> None:
        """Give nothing any more; what is ready is for the pool to free."""
        self.is_gone = True
        self.given, self.last, self.before_last = [], _NEVER, _NEVER

    def is_for(self, allocation: Allocation) -> bool:
        """Whether its tensors take as much; one that a reservation gave may take less."""
        return (self.size, self.is_small) == (allocation.size, allocation.is_small)

    def forget(self, export: Export) -> None:
        """The export is neither given nor ready; it may become another tensor."""
        if self.last is export:
            self.last = _NEVER
        if self.before_last is export:
            self.before_last = _NEVER
        for exports in (self.given, self.ready):
            if export in exports:
                exports.remove(export)


class Shelves:
    """The shelves of a pool, which sees to it that one thread changes them at a time."""

    def __init__(self) -> None:
        self.by_dtype: dict[Any, dict[Any, Shelf]] = {}
        """by dtype and shape; the shape of one dimension is also there as an integer."""
        self.held = 0
        """tensors that are ready."""
        self._all: list[Shelf] = []

    def __iter__(self) -> Iterator[Shelf]:
        return iter(self._all)

    @property
    def is_full(self) -> bool:
        """Whether all should be forgotten before one is added."""
        return len(self._all) >= _MOST_SHELVES

    def shelf(self, shape: tuple[int, ...], dtype: Any, allocation: Allocation) -> Shelf:
        """The shelf of a shape and dtype, whose tensors need as much as this allocation."""
        shelves = self.by_dtype.setdefault(dtype, {})
        shelf = shelves.get(shape)
        if shelf is not None and not shelf.is_for(allocation):
            shelf.close()
            shelf = None
        if shelf is None:
            shelf = Shelf(allocation.size, allocation.nbytes, allocation.is_small)
            self._all.append(shelf)  # first, or one that is found might never be flushed
            shelves[shape] = shelf
            if len(shape) == 1:
                shelves[shape[0]] = shelf
        return shelf

    def find(self, shape: tuple[int, ...], dtype: Any) -> Shelf | None:
        """The shelf of a shape and dtype, if there is one."""
        shelves = self.by_dtype.get(dtype)
        return None if shelves is None else shelves.get(shape)

    def take(self, shelf: Shelf) -> Export | None:
        """A tensor that is ready, at rest still."""
        if not shelf.ready:
            return None
        self.held -= 1
        return shelf.ready.pop()

    def has_place_for(self, export: Export) -> bool:
        """Whether a tensor may stay ready."""
        shelf = export.shelf
        if shelf is None or shelf.is_gone or not shelf.is_small:
            return False
        return len(shelf.ready) < _MOST_READY

    def put(self, export: Export) -> None:
        """Keep a tensor ready."""
        shelf = export.shelf
        shelf.forget(export)  # or it would be among the given twice when it is given again
        shelf.ready.append(export)
        self.held += 1

    def clear(self) -> list[Shelf]:
        """Forget all shelves; they are the caller's."""
        for shelf in self._all:
            shelf.close()  # first: what they hold is not ready, should we be interrupted
        gone, self._all = self._all, []
        self.held = 0
        self.by_dtype.clear()
        return gone
