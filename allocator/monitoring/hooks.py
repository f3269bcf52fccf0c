"""Hooks: objects that observe a pool, may refuse an allocation, or free memory for one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from allocator.pool.allocation import Allocation
from allocator.pool.blocks import Segment
from allocator.pool.errors import report


class Hook:
    """Base class of hooks; override the methods you need.

    Allocations of zero bytes take no memory and are not reported. An allocation made by a finalizer
    or a signal handler in the middle of the pool's own work gets memory directly from the driver,
    without :meth:`grown`: its :attr:`Allocation.block` is None.

    :meth:`released`, :meth:`grown` and :meth:`shrunk` are called with the pool's lock held. A lock
    of your own that they take must not be held around a call of a pool, else two threads may wait
    for each other forever. Nor may they call another pool whose hooks call this one.

    Example:
        >>> from allocator import Pool
        >>> class Largest(Hook):
        ...     nbytes = 0
        ...
        ...     def allocated(self, pool, allocation):
        ...         self.nbytes = max(self.nbytes, allocation.nbytes)
        >>> largest, pool = Largest(), Pool("cpu")
        >>> with pool.hook(largest):
        ...     x = pool.empty(1000)
        >>> largest.nbytes
        4000
    """

    def before_allocate(self, pool: Any, nbytes: int) -> None:
        """Called before an allocation; raise to refuse it.

        Args:
            pool: the :class:`Pool` that is asked.
            nbytes: bytes asked for.
        """

    def allocated(self, pool: Any, allocation: Allocation) -> None:
        """Called after an allocation; if this raises, it is undone and the caller gets the error.

        Args:
            pool: the :class:`Pool` that made it.
            allocation: the new allocation.
        """

    def released(self, pool: Any, allocation: Allocation) -> None:
        """Called when memory is released; errors go to :data:`sys.unraisablehook`.

        Args:
            pool: the :class:`Pool` that took it back.
            allocation: the released allocation, its fields unchanged.
        """

    def grown(self, pool: Any, address: int, nbytes: int) -> None:
        """Called after the driver gave a segment.

        Args:
            pool: the :class:`Pool` that asked for it.
            address: address of the segment's first byte.
            nbytes: size of the segment.
        """

    def shrunk(self, pool: Any, address: int, nbytes: int) -> None:
        """Called after a segment was returned to the driver.

        Args:
            pool: the :class:`Pool` that held it.
            address: address of the segment's first byte.
            nbytes: size of the segment.
        """

    def out_of_memory(self, pool: Any, nbytes: int) -> bool:
        """Called when an allocation finds no room; free something and return True to retry.

        Args:
            pool: the :class:`Pool` that has no room.
            nbytes: bytes asked for.

        Returns:
            whether to try again.
        """
        return False


class Hooks:
    """The hooks of one pool, and the order and error rules by which they are called."""

    def __init__(self) -> None:
        self.all: tuple[Hook, ...] = ()

    def add(self, hook: Hook) -> None:
        """Call a hook from now on, after the others."""
        self.all = (*self.all, hook)

    def remove(self, hook: Hook) -> None:
        """Undo the last addition of a hook; one that was never added changes nothing."""
        hooks = list(self.all)
        for i in reversed(range(len(hooks))):
            if hooks[i] is hook:
                del hooks[i]
                break
        self.all = tuple(hooks)

    def allocated(self, pool: Any, allocation: Allocation, hooks: tuple[Hook, ...]) -> None:
        """Report an allocation to hooks; if one refuses, report a release to the earlier ones."""
        for i, hook in enumerate(hooks):
            try:
                hook.allocated(pool, allocation)
            except BaseException:
                for told in hooks[:i]:
                    _call(told, "released", pool, allocation)
                raise

    def released(self, pool: Any, allocation: Allocation) -> None:
        """Report a release to all hooks."""
        for hook in self.all:
            _call(hook, "released", pool, allocation)

    def segments(self, pool: Any, returned: Iterable[Segment], taken: Iterable[Segment]) -> None:
        """Report segments returned to the driver and taken from it to all hooks."""
        for segment in returned:
            for hook in self.all:
                _call(hook, "shrunk", pool, segment.address, segment.size)
        for segment in taken:
            for hook in self.all:
                _call(hook, "grown", pool, segment.address, segment.size)

    def out_of_memory(self, pool: Any, nbytes: int) -> bool:
        """Whether a hook asks for another try."""
        return any(hook.out_of_memory(pool, nbytes) for hook in self.all)


def check_hook(hook: Any) -> None:
    """Raise TypeError unless ``hook`` is a :class:`Hook`, or another object with its methods."""
    if isinstance(hook, Hook):
        return
    methods = [name for name in vars(Hook) if not name.startswith("_")]
    has_all = all(callable(getattr(hook, name, None)) for name in methods)
    if isinstance(hook, type) or not has_all:
        raise TypeError(
            f"hook={hook!r} is not an instance of allocator.Hook; derive a class from it, and pass "
            "an instance"
        )


def _call(hook: Hook, method: str, *args: Any) -> None:
    """Call a hook's method; an error cannot undo what has happened."""
    try:
        getattr(hook, method)(*args)  # the attribute may be the user's code too
    except Exception as error:  # user code may raise anything
        report(error, "Exception ignored in a pool's hook", hook)
