"""The debug mode of a pool: who writes where nothing is his."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import heapq
import itertools
import os
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from allocator.pool import lifecycle
from allocator.pool.allocation import Allocation
from allocator.pool.errors import report
from allocator.pool.sizes import size_text
from allocator.watching.history import Frames, Stacks
from allocator.watching.hooks import Hook

if TYPE_CHECKING:
    from allocator.exchange.memory import Memory
    from allocator.pool.pool import Pool

REDZONE = 512
"""bytes before and behind each allocation that nobody may write to."""
ON_ALLOCATION = 0xFF
"""fills new memory: NaN in all floating types."""
ON_RELEASE = 0xDB
"""fills released memory."""
IN_REDZONE = 0xA5
QUARANTINE = 64 << 20
"""bytes of released blocks that are not given again yet."""

_CHUNK = 1 << 20


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
        """one of "overflow before", "overflow after", "use after release", "double release"."""
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

    def __init__(self, allocation: Allocation, number: int, allocated_at: Frames) -> None:
        self.address = allocation.address
        self.nbytes = allocation.nbytes
        self.number = number
        """0, 1, 2, ... in order of allocation."""
        self.allocated_at = allocated_at
        self.released_at: Frames = []
        self.is_over = False
        """whether it is painted as released memory is."""

    def error(
        self, kind: str, offset: int | None, released_at: Frames | None = None
    ) -> MemoryCorruptionError:
        return MemoryCorruptionError(
            kind,
            address=self.address,
            nbytes=self.nbytes,
            offset=offset,
            allocated_at=_texts(self.allocated_at),
            released_at=_texts(released_at or self.released_at),
        )


class Guard(Hook):
    """Paints a pool's memory, and looks whether the paint is whole.

    Host-accessible memory only. As a hook, the pool's first, it sees all that is given and comes
    back; what came back stays in quarantine for a while. What it finds is kept until
    :meth:`raise_found`, as it is mostly found where nothing can be raised.
    """

    def __init__(self) -> None:
        self.room = QUARANTINE
        """bytes that may be in quarantine."""
        self._stacks = Stacks()
        self._count = itertools.count()
        self._quarantine: list[tuple[int, int, Allocation]] = []
        """a heap, by when it came in and the number; so that the order depends on the calls alone.
        """
        self._quarantined = 0
        self._looks = 0
        self._found: deque[MemoryCorruptionError] = deque()
        self._ended: dict[int, tuple[_Life, Frames]] = {}
        """the last allocation of each export that is over, by the export's address."""

    # ------------------------------------------------------------------ what the pool tells

    def allocated(self, pool: Pool, allocation: Allocation) -> None:
        """Paint it."""
        _wait(pool)  # for what is still done with its memory's last owner
        ctypes.memset(allocation.address, ON_ALLOCATION, allocation.nbytes)
        for start, nbytes in _redzones(allocation):
            ctypes.memset(start, IN_REDZONE, nbytes)
        # Last: an allocation that has a life is painted.
        allocation.note(Guard, _Life(allocation, next(self._count), self._stacks.here()))

    def released(self, pool: Pool, allocation: Allocation) -> None:
        """Look at its redzones, and paint what was its own."""
        _wait(pool)
        while allocation.queues:
            allocation.queues.pop().wait()
        life = _life_of(allocation)
        if life is None:
            return
        life.released_at = self._stacks.here()
        self._look_around(allocation)
        ctypes.memset(allocation.address, ON_RELEASE, allocation.nbytes)
        life.is_over = True

    def ended(self, export: int, owner: Allocation | Memory) -> None:
        """A consumer has called the deleter of the export at this address."""
        allocation = owner if isinstance(owner, Allocation) else owner._allocation
        life = None if allocation is None else _life_of(allocation)
        if life is not None:
            self._ended[export] = life, self._stacks.here()

    def ended_again(self, export: int) -> None:
        """A consumer has called it although nothing was out."""
        if export in self._ended:
            life, released_at = self._ended[export]
            self._found.append(life.error("double release", None, released_at))

    # ------------------------------------------------------------------ quarantine

    def admit(self, allocation: Allocation) -> Iterable[Allocation]:
        """Put an allocation that is over in quarantine; what does not go there."""
        life = _life_of(allocation)
        if allocation.block is None or life is None or not life.is_over:
            return (allocation,)
        allocation.pool = None  # which may die with a quarantine
        self._quarantined += allocation.size
        heapq.heappush(self._quarantine, (self._looks, life.number, allocation))
        return ()

    def discharge(self, most: int | None = None) -> Iterable[Allocation]:
        """Those that have been in quarantine for the longest, each to be made free at once.

        Args:
            most: bytes that stay; as many as may if None.
        """
        most = self.room if most is None else most
        self._looks += 1
        while self._quarantine and self._quarantined > most:
            _, _, oldest = heapq.heappop(self._quarantine)
            self._quarantined -= oldest.size
            self._look_inside(oldest)
            yield oldest

    def recover(self) -> list[Allocation]:
        """After an exception from outside: what is in quarantine."""
        quarantined = [allocation for _, _, allocation in self._quarantine]
        self._quarantined = sum(allocation.size for allocation in quarantined)
        return quarantined

    # ------------------------------------------------------------------ what is asked of it

    def check(self, pool: Pool) -> None:
        """Look at all that is in use or in quarantine."""
        with pool._lock, pool._section as is_outermost:
            if is_outermost:
                pool._drain()
                _wait(pool)
                for allocation in list(pool._store.in_use.values()):  # a finalizer may add some
                    self._look_around(allocation)
                for _, _, allocation in self._quarantine:
                    self._look_inside(allocation)

    def raise_found(self) -> None:
        """Raise the oldest problem that was not raised yet, if there is one."""
        with contextlib.suppress(IndexError):
            raise self._found.popleft()

    def report(self, pool: Pool) -> None:
        """Look a last time, and write all problems to stderr: nobody is left to raise to."""
        self.check(pool)
        while self._found:
            report(self._found.popleft(), f"Found by the debug mode of {pool.name}")

    # ------------------------------------------------------------------ the rest

    def _look_around(self, allocation: Allocation) -> None:
        """Look for writes outside of an allocation in use."""
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
            ctypes.memset(start, paint, nbytes)  # so that it is found once


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


def _first_wrong(address: int, nbytes: int, value: int) -> int | None:
    """The address of the first byte that has another value."""
    right = bytes([value]) * min(nbytes, _CHUNK)
    for start in range(address, address + nbytes, _CHUNK):
        found = ctypes.string_at(start, min(_CHUNK, address + nbytes - start))
        if found != right[: len(found)]:
            return start + len(found) - len(found.lstrip(right[:1]))
    return None


def _wait(pool: Pool) -> None:
    """Until kernels are done: memory may be released while one still uses it."""
    for queue in list(pool._store.heaps):
        queue = pool.sycl_queue if queue is None else queue
        if queue is not None:
            queue.wait()


def _texts(frames: Frames) -> list[str]:
    return [f"{frame['filename']}:{frame['line']}({frame['name']})" for frame in frames]


def new_guard(pool: Pool) -> Guard:
    """A guard of ``pool``, whose last findings are written when the process ends.

    Raises:
        RuntimeError: Python cannot read the pool's memory.
    """
    if not pool.is_host_accessible:
        raise RuntimeError(
            f"debug=True, but Python cannot read and paint the memory of {pool.name}; use "
            'kind="shared" or kind="host", or debug=False'
        )
    guard = Guard()
    pool._store.margin = REDZONE
    pool._store.leaving = guard.admit
    return guard


@atexit.register
def _report_at_exit() -> None:
    for pool in lifecycle.pools():
        if pool._guard is not None and pool._process == os.getpid():
            pool._guard.report(pool)
