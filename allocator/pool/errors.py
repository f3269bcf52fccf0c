"""The error of an allocation that finds no room, and the report of errors that nobody catches."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from allocator.runtime.formatting import size_text


class Site(NamedTuple):
    """A place in the program, and the memory that it holds."""

    where: str
    """file:line(function), if recorded."""
    nbytes: int
    blocks: int


def reduced(error: BaseException) -> tuple[Any, ...]:
    """What ``__reduce__`` returns for an error whose constructor takes keywords.

    The constructor is not called again, so attributes and notes may be added to the error.
    """
    return _without_init, (type(error), *error.args), vars(error)


def _without_init(kind: type[BaseException], *args: Any) -> BaseException:
    return kind.__new__(kind, *args)


class OutOfMemoryError(MemoryError):
    """The device or a limit has no room for an allocation; the pool stays usable.

    All figures of the message are attributes too.
    """

    def __init__(
        self,
        requested: int,
        *,
        pool: str,
        live: int,
        reserved: int,
        limit: int | None,
        largest_free: int,
        sites: Sequence[Site] = (),
        reason: str = "",
    ) -> None:
        self.requested = requested
        """bytes asked for."""
        self.pool = pool
        """the pool's name."""
        self.live = live
        """bytes in use."""
        self.reserved = reserved
        """bytes taken from the driver."""
        self.limit = limit
        """most bytes to take from the driver, or None."""
        self.largest_free = largest_free
        """bytes of the largest free block."""
        self.sites = list(sites)
        """places in the program that hold the most, largest first."""
        self.reason = reason
        """explanation of the driver or the limit."""
        super().__init__(self._message())

    @property
    def fragmentation(self) -> float:
        """1 - largest_free / free bytes; 0 if nothing is free."""
        free = self.reserved - self.live
        return 1 - self.largest_free / free if free else 0.0

    def _message(self) -> str:
        free = self.reserved - self.live
        limit = "none" if self.limit is None else size_text(self.limit)
        reason = f": {self.reason}" if self.reason else ""
        figures = (
            f"  live {size_text(self.live)}, reserved {size_text(self.reserved)}, limit {limit}, "
            f"free {size_text(free)}, the largest block {size_text(self.largest_free)} "
            f"(fragmentation {self.fragmentation:.2f})"
        )
        lines = [f"{self.pool} has no room for {size_text(self.requested)}{reason}", figures]
        if self.sites:
            lines.append("  most is held by:")
            lines += [f"    {size_text(s.nbytes)} in {s.blocks}: {s.where}" for s in self.sites]
        is_limited = self.limit is not None and self.reserved + self.requested > self.limit
        other = "raise the limit" if is_limited else "allocate less at once"
        lines.append(f"  cure: release tensors that are no longer needed, or {other}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


def report(error: BaseException, message: str, source: Any = None) -> None:
    """Pass an error that nobody can catch to ``sys.unraisablehook``."""
    # Python's default hook accepts only its own type, which has no public name.
    kinds: list[Any] = tuple.__subclasses__()
    (kind,) = (kind for kind in kinds if kind.__name__ == "UnraisableHookArgs")
    sys.unraisablehook(kind((type(error), error, error.__traceback__, message, source)))
