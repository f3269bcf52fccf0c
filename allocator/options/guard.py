"""The debug mode of a pool: detects writes outside of allocations and to released memory."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import heapq
import itertools
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

from allocator.monitoring.history import Frames, Stacks
from allocator.monitoring.hooks import Hook
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.errors import reduced, report
from allocator.pool.store import Store
from allocator.runtime.formatting import size_text

REDZONE = 512
"""bytes before and after each allocation that nothing may write to."""
ON_ALLOCATION = 0xFF
"""fills new memory: NaN in all floating types."""
ON_RELEASE = 0xDB
"""fills released memory."""
IN_REDZONE = 0xA5
QUARANTINE = 64 << 20
"""bytes of released blocks that are kept from being allocated again."""

_CHUNK = 1 << 20


class MemoryCorruptionError(RuntimeError):
    """Something wrote outside of its memory or to released memory, or released memory twice."""

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
        """address of the allocation's first byte."""
        self.nbytes = nbytes
        """bytes of the allocation."""
        self.offset = offset
        """offset of the first overwritten byte from the address; None for a double release."""
        self.allocated_at = allocated_at
        """stack of the allocation, innermost first, as "file:line(function)"."""
        self.released_at = released_at
        """stack of the pool's call that noticed the release; empty if the memory is in use."""
        super().__init__(self._message())

    def _message(self) -> str:
        where = "" if self.offset is None else f": byte {self.offset} was overwritten"
        relation = "" if self.kind.startswith("overflow") else " of"  # "overflow after the 400 B"
        lines = [f"{self.kind}{relation} the {size_text(self.nbytes)} at {self.address:#x}{where}"]
        lines += ["  allocated at:", *(f"    {frame}" for frame in self.allocated_at)]
        if self.released_at:
            lines += ["  release seen at:", *(f"    {frame}" for frame in self.released_at)]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)


class _Life:
    """The facts that an error reports about an allocation, also after its end."""

    def __init__(self, allocation: Allocation, number: int, allocated_at: Frames) -> None:
        self.address = allocation.address
        self.nbytes = allocation.nbytes
        self.number = number
        """its place in the order of allocations."""
        self.allocated_at = allocated_at
        self.released_at: Frames = []
        self.is_over = False
        """whether it is filled as released memory."""

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
    """Fills a pool's memory with patterns, and checks them later.

    For host-accessible memory only. It is the pool's first hook, so it sees all allocations and
    releases. Released blocks stay in quarantine for a while. Problems are kept until
    :meth:`raise_found`, as most are found in places that cannot raise.
    """

    def __init__(self, store: Store) -> None:
        self.room = QUARANTINE
        """bytes that may be in quarantine."""
        self._store = store
        self._stacks = Stacks()
        self._count = itertools.count()
        self._quarantine: list[tuple[int, int, Allocation]] = []
        """a heap ordered by arrival and number, so that the order depends on the calls alone."""
        self._quarantined_bytes = 0
        self._discharges = 0
        self._found: deque[MemoryCorruptionError] = deque()
        self._ended: dict[int, tuple[_Life, Frames]] = {}
        """the last ended allocation of each export, by the export's address."""

    @classmethod
    def attach(cls, core: Core) -> None:
        """Turn a pool's debug mode on; when the process exits, the last findings are written."""
        if not core.store.source.driver.is_host_accessible:
            raise RuntimeError(
                f"debug=True, but Python cannot read and fill the memory of {core.name}; use "
                'kind="shared" or kind="host", or debug=False'
            )
        guard = cls(core.store)
        core.store.margin = REDZONE
        core.store.leaving = guard.admit
        core.debugger = guard
        core.hooks.add(guard)
        _debugged.add(core)

    # ------------------------------------------------------------------ events

    def allocated(self, pool: Any, allocation: Allocation) -> None:
        """Fill the allocation's memory."""
        self._wait()  # for work that still uses the memory of its previous owner
        ctypes.memset(allocation.address, ON_ALLOCATION, allocation.nbytes)
        for start, nbytes in _redzones(allocation):
            ctypes.memset(start, IN_REDZONE, nbytes)
        # Last: only filled allocations have a life.
        allocation.note(Guard, _Life(allocation, next(self._count), self._stacks.here()))

    def released(self, pool: Any, allocation: Allocation) -> None:
        """Check the allocation's redzones, and fill its memory."""
        self._wait()
        while allocation.queues:
            allocation.queues.pop().wait()
        life = _life_of(allocation)
        if life is None:
            return
        life.released_at = self._stacks.here()
        self._check_redzones(allocation)
        ctypes.memset(allocation.address, ON_RELEASE, allocation.nbytes)
        life.is_over = True

    def ended(self, export: int, allocation: Allocation | None) -> None:
        """Note that a consumer called the deleter of the export at this address."""
        life = None if allocation is None else _life_of(allocation)
        if life is not None:
            self._ended[export] = life, self._stacks.here()

    def deleted_again(self, export: int) -> None:
        """Note that a consumer called the deleter of the export at this address a second time."""
        if export in self._ended:
            life, released_at = self._ended[export]
            self._found.append(life.error("double release", None, released_at))

    # ------------------------------------------------------------------ quarantine

    def admit(self, allocation: Allocation) -> Iterable[Allocation]:
        """Put an ended allocation into quarantine; returns it if it cannot go there."""
        life = _life_of(allocation)
        if allocation.block is None or life is None or not life.is_over:
            return (allocation,)
        allocation.pool = None  # which may be freed together with its quarantine
        self._quarantined_bytes += allocation.size
        heapq.heappush(self._quarantine, (self._discharges, life.number, allocation))
        return ()

    def discharge(self, most: int | None) -> Iterable[Allocation]:
        """The allocations longest in quarantine, until at most ``most`` bytes stay.

        None stands for :attr:`room`.
        """
        most = self.room if most is None else most
        self._discharges += 1
        while self._quarantine and self._quarantined_bytes > most:
            _, _, oldest = heapq.heappop(self._quarantine)
            self._quarantined_bytes -= oldest.size
            self._check_all(oldest)
            yield oldest

    def quarantined(self) -> list[Allocation]:
        """The allocations in quarantine, after an asynchronous exception."""
        quarantined = [allocation for _, _, allocation in self._quarantine]
        self._quarantined_bytes = sum(allocation.size for allocation in quarantined)
        return quarantined

    # ------------------------------------------------------------------ checks

    def check(self, core: Core) -> None:
        """Check all memory in use or in quarantine."""
        with core.lock, core.reentrancy as is_outermost:
            if is_outermost:
                core.drain()
                self._wait()
                for allocation in list(core.store.in_use.values()):  # a finalizer may add some
                    self._check_redzones(allocation)
                for _, _, allocation in self._quarantine:
                    self._check_all(allocation)

    def raise_found(self) -> None:
        """Raise the oldest problem that was not raised yet, if there is one."""
        with contextlib.suppress(IndexError):
            raise self._found.popleft()

    def report(self, core: Core) -> None:
        """Check a last time, and write all problems to stderr, as no later call can raise them."""
        self.check(core)
        while self._found:
            report(self._found.popleft(), f"Found by the debug mode of {core.name}")

    def _check_redzones(self, allocation: Allocation) -> None:
        """Look for writes around an allocation in use."""
        life = _life_of(allocation)
        if life is None:
            return
        kinds = "overflow before", "overflow after"
        for kind, (start, nbytes) in zip(kinds, _redzones(allocation)):
            self._check_bytes(life, kind, start, nbytes, IN_REDZONE)

    def _check_all(self, allocation: Allocation) -> None:
        """Look for writes anywhere in the block of a released allocation."""
        life = _life_of(allocation)
        if life is None:
            return
        kind = "use after release"
        self._check_bytes(life, kind, allocation.address, allocation.nbytes, ON_RELEASE)
        for start, nbytes in _redzones(allocation):
            self._check_bytes(life, kind, start, nbytes, IN_REDZONE)

    def _check_bytes(self, life: _Life, kind: str, start: int, nbytes: int, value: int) -> None:
        wrong = _first_wrong(start, nbytes, value)
        if wrong is not None:
            self._found.append(life.error(kind, wrong - life.address))
            ctypes.memset(start, value, nbytes)  # so that it is reported once

    def _wait(self) -> None:
        """Wait for the queues' kernels: memory may be released while one still uses it."""
        for queue in self._store.queues:
            queue.wait()


def _life_of(allocation: Allocation) -> _Life | None:
    life: _Life | None = None if allocation.notes is None else allocation.notes.get(Guard)
    return life


def _redzones(allocation: Allocation) -> tuple[tuple[int, int], tuple[int, int]]:
    """Start and size of the parts of an allocation's block before and after it."""
    block, end = allocation.block, allocation.address + allocation.nbytes
    if block is None:
        return (allocation.address - REDZONE, REDZONE), (end, REDZONE)
    before = allocation.address - block.address
    return (block.address, before), (end, block.address + block.size - end)


def _first_wrong(address: int, nbytes: int, value: int) -> int | None:
    """The address of the first byte with another value."""
    right = bytes([value]) * min(nbytes, _CHUNK)
    for start in range(address, address + nbytes, _CHUNK):
        found = ctypes.string_at(start, min(_CHUNK, address + nbytes - start))
        if found != right[: len(found)]:
            return start + len(found) - len(found.lstrip(right[:1]))
    return None


def _texts(frames: Frames) -> list[str]:
    return [f"{frame['filename']}:{frame['line']}({frame['name']})" for frame in frames]


_debugged: weakref.WeakSet[Core] = weakref.WeakSet()


@atexit.register
def _report_at_exit() -> None:
    for core in list(_debugged):
        if core.debugger is not None and core.is_in_own_process:
            core.debugger.report(core)
