"""The debug mode of a pool: who writes where nothing is his."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from allocator import _process
from allocator._allocation import Allocation
from allocator._hooks import Hook
from allocator._sizes import size_text

if TYPE_CHECKING:
    from allocator._pool import Pool
    from allocator._store import Store

REDZONE = 512
"""bytes before and behind each allocation that nobody may write to."""
ON_ALLOCATION = 0xFF
"""fills new memory: NaN in all floating types."""
ON_RELEASE = 0xDB
"""fills released memory."""
IN_REDZONE = 0xA5
QUARANTINE = 64 << 20
"""bytes of released blocks that are not given again yet."""

_DEEPEST = 32  # frames of a stack
_CHUNK = 1 << 20
_OWN_CODE = __name__.partition(".")[0]


class MemoryCorruptionError(RuntimeError):
    """Something wrote to memory that was not its own, or released it twice."""

    def __init__(
        self,
        kind: str,
        *,
        address: int,
        nbytes: int,
        offset: int | None,
        allocated_at: list[str],
        released_at: list[str],
    ) -> None:
        self.kind = kind
        """"overflow before", "overflow after", "use after release" or "double release"."""
        self.address = address
        """of the allocation's first byte."""
        self.nbytes = nbytes
        """bytes of the allocation."""
        self.offset = offset
        """of the first wrong byte from the address; None of a double release."""
        self.allocated_at = allocated_at
        """the stack, innermost first, as "file:line(function)"."""
        self.released_at = released_at
        """the stack of the pool's call that saw the release; empty if it is in use."""
        super().__init__(self._message())

    def _message(self) -> str:
        where = "" if self.offset is None else f": byte {self.offset} was overwritten"
        lines = [f"{self.kind} of {size_text(self.nbytes)} at {self.address:#x}{where}"]
        lines += ["  allocated at:", *(f"    {frame}" for frame in self.allocated_at)]
        if self.released_at:
            lines += ["  release seen at:", *(f"    {frame}" for frame in self.released_at)]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        facts = dict(vars(self))
        return _restored, (facts.pop("kind"), facts)


def _restored(kind: str, facts: dict[str, Any]) -> MemoryCorruptionError:
    return MemoryCorruptionError(kind, **facts)


class _Life:
    """What an error says of an allocation, when that is gone too."""

    def __init__(self, allocation: Allocation) -> None:
        self.address = allocation.address
        self.nbytes = allocation.nbytes
        self.allocated_at = _stack()
        self.released_at: list[str] = []

    def error(self, kind: str, offset: int | None = None) -> MemoryCorruptionError:
        return MemoryCorruptionError(
            kind,
            address=self.address,
            nbytes=self.nbytes,
            offset=offset,
            allocated_at=self.allocated_at,
            released_at=self.released_at,
        )


class Guard(Hook):
    """Paints a pool's memory, and looks whether the paint is whole.

    Host-accessible memory only. As a hook it sees all that is given and comes back; what came back
    stays in quarantine for a while. What it finds is kept until :meth:`raise_found`, as it is
    mostly found where nothing can be raised.
    """

    def __init__(self, store: Store, queue: Any) -> None:
        self._store = store
        self._queue = queue
        self._quarantine: deque[Allocation] = deque()
        self._quarantined = 0
        self._found: deque[MemoryCorruptionError] = deque()
        self._ended: dict[int, _Life] = {}
        """the last allocation of each export that is over, by the export's address."""
        store.margin = REDZONE
        store.leaving = self._exchange

    # ------------------------------------------------------------------ what the pool tells

    def allocated(self, pool: Pool, allocation: Allocation) -> None:
        """Paint it."""
        self._wait()  # for what is still done with its memory's last owner
        allocation.note(Guard, _Life(allocation))
        _fill(allocation.address, allocation.nbytes, ON_ALLOCATION)
        for start, nbytes in _redzones(allocation):
            _fill(start, nbytes, IN_REDZONE)

    def released(self, pool: Pool, allocation: Allocation) -> None:
        """Look at its redzones, and paint what was its own."""
        self._wait()
        while allocation.queues:
            allocation.queues.pop().wait()
        life = _life_of(allocation)
        if life is None:  # its allocation failed in another hook, before it was painted
            return
        life.released_at = _stack()
        self._look_around(allocation)
        _fill(allocation.address, allocation.nbytes, ON_RELEASE)

    @property
    def quarantined(self) -> set[int]:
        """The ids of the allocations in quarantine."""
        return {id(allocation) for allocation in self._quarantine}

    def ended(self, export: int, owner: Any) -> None:
        """A consumer has called the deleter of the export at this address, of an allocation."""
        life = _life_of(owner) if isinstance(owner, Allocation) else None
        if life is not None:
            self._ended[export] = life

    def ended_again(self, export: int) -> None:
        """A consumer has called it although nothing was out."""
        life = self._ended.get(export)
        if life is not None:
            self._found.append(life.error("double release"))

    # ------------------------------------------------------------------ what is asked of it

    def check(self) -> None:
        """Look at all that is in use or in quarantine."""
        self._wait()
        for allocation in list(self._store.in_use.values()):
            self._look_around(allocation)
        for allocation in self._quarantine:
            self._look_inside(allocation)

    def empty_quarantine(self) -> None:
        """Make all of it free."""
        gone, self._quarantine = self._quarantine, deque()
        self._quarantined = 0
        self._wait()
        for allocation in gone:
            self._look_inside(allocation)
        self._store.make_free(gone)

    def raise_found(self) -> None:
        """Raise the oldest problem that was not raised yet, if there is one."""
        if self._found:
            raise self._found.popleft()

    def report(self) -> None:
        """Look a last time, and write all problems to stderr: nobody is left to raise to."""
        self.check()
        while self._found:
            error = self._found.popleft()
            sys.unraisablehook(
                SimpleNamespace(
                    exc_type=type(error),
                    exc_value=error,
                    exc_traceback=None,
                    err_msg="Found by a pool's debug mode",
                    object=None,
                )
            )

    # ------------------------------------------------------------------ the rest

    def _wait(self) -> None:
        """Until kernels are done: memory may be released while one still uses it."""
        if self._queue is not None:
            self._queue.wait()

    def _exchange(self, allocation: Allocation) -> Iterable[Allocation]:
        """Put it in quarantine; what has been there for the longest leaves."""
        if allocation.block is None or _life_of(allocation) is None:
            return (allocation,)
        allocation.pool = None  # which may die with a quarantine
        self._quarantine.append(allocation)
        self._quarantined += allocation.size
        leaving = []
        while self._quarantined > QUARANTINE:
            oldest = self._quarantine.popleft()
            self._quarantined -= oldest.size
            self._look_inside(oldest)
            leaving.append(oldest)
        return leaving

    def _look_around(self, allocation: Allocation) -> None:
        """Look for writes outside of the allocation."""
        life = _life_of(allocation)
        if life is None:
            return
        kinds = "overflow before", "overflow after"
        for kind, (start, nbytes) in zip(kinds, _redzones(allocation)):
            self._look(life, kind, start, nbytes, IN_REDZONE)

    def _look_inside(self, allocation: Allocation) -> None:
        """Look for writes anywhere in the block of a released allocation."""
        life = _life_of(allocation)
        if life is None:
            return
        kind = "use after release"
        self._look(life, kind, allocation.address, allocation.nbytes, ON_RELEASE)
        for start, nbytes in _redzones(allocation):
            self._look(life, kind, start, nbytes, IN_REDZONE)

    def _look(self, life: _Life, kind: str, start: int, nbytes: int, paint: int) -> None:
        wrong = _first_wrong(start, nbytes, paint)
        if wrong is not None:
            self._found.append(life.error(kind, wrong - life.address))
            _fill(start, nbytes, paint)  # so that it is found once


def _life_of(allocation: Allocation) -> _Life | None:
    life: _Life | None = None if allocation.notes is None else allocation.notes.get(Guard)
    return life


def _redzones(allocation: Allocation) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and bytes of what is before and behind an allocation in its block."""
    block, end = allocation.block, allocation.address + allocation.nbytes
    if block is None:
        return (allocation.address - REDZONE, REDZONE), (end, REDZONE)
    before = allocation.address - block.address
    return (block.address, before), (end, block.address + block.size - end)


def _fill(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def _first_wrong(address: int, nbytes: int, value: int) -> int | None:
    """The address of the first byte that has another value."""
    right = bytes([value]) * min(nbytes, _CHUNK)
    for start in range(address, address + nbytes, _CHUNK):
        found = ctypes.string_at(start, min(_CHUNK, address + nbytes - start))
        if found != right[: len(found)]:
            return start + len(found) - len(found.lstrip(right[:1]))
    return None


def _stack() -> list[str]:
    """Who called the pool, innermost first."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_own(frame.f_globals):
        frame = frame.f_back
    frames: list[str] = []
    caller: Any = frame
    while caller is not None and len(frames) < _DEEPEST:
        code = caller.f_code
        frames.append(f"{code.co_filename}:{caller.f_lineno}({code.co_name})")
        caller = caller.f_back
    return frames


def _is_own(namespace: dict[str, Any]) -> bool:
    return bool(namespace.get("__package__") == _OWN_CODE)


def guard(pool: Pool) -> Guard:
    """A guard of ``pool``, whose last findings are written when the process ends.

    Raises:
        RuntimeError: Python cannot read the pool's memory.
    """
    if not pool.is_host_accessible:
        raise RuntimeError(
            f"debug=True, but Python cannot read and paint the memory of {pool.name}; use "
            'kind="shared" or kind="host", or debug=False'
        )
    return Guard(pool._store, pool.sycl_queue)


@atexit.register
def _report_at_exit() -> None:
    for pool in _process.pools():
        if pool._guard is not None and pool._process == os.getpid():
            pool.tally()
            pool._guard.report()
