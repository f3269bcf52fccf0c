"""Shared by the pool's tests: drivers over host memory, another queue, checks of a pool."""

from __future__ import annotations

import copy
import ctypes
import random
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from allocator import Pool, load_dpctl
from allocator.exchange.reuse import _NEVER
from allocator.pool.blocks import Heap

if TYPE_CHECKING:
    import pytest

KIB = 2**10
MIB = 2**20


class FaultyDriver:
    """A driver over ctypes host memory that fails when told to."""

    name = "faulty"
    capacity = 100 * MIB
    is_host_accessible = True
    dlpack_device = (1, 0)
    queue: Any = None
    alignment = 512
    shift = 0

    def __init__(self, fails: Callable[[FaultyDriver, int], bool] = lambda *_: False) -> None:
        self.fails = fails
        self.error: Exception = MemoryError("faulty: told to fail")
        self.calls = 0
        self.held: dict[int, Any] = {}

    @property
    def reserved(self) -> int:
        return sum(nbytes for nbytes, _ in self.held.values())

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        self.calls += 1
        if self.fails(self, nbytes):
            raise copy.copy(self.error)  # a raised error keeps its frames alive
        buffer = ctypes.create_string_buffer(nbytes + self.alignment)
        address = -(-ctypes.addressof(buffer) // self.alignment) * self.alignment + self.shift
        self.held[address] = nbytes, buffer
        return address, address

    def release(self, handle: Any) -> None:
        del self.held[handle]

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: memoryview) -> None:
        ctypes.memmove(address, bytes(data), data.nbytes)


class AligningDriver(FaultyDriver):
    """A driver that aligns to 2 MiB, as the real one does with large allocations."""

    capacity = 1024 * MIB
    alignment = 2 * MIB


class Handle:
    """The only reference to an allocation of a driver."""

    def __init__(self, address: int) -> None:
        self.address = address


class DroppingDriver(FaultyDriver):
    """A driver that shows which handles are alive: memory lives as long as its handle."""

    def __init__(self) -> None:
        super().__init__()
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        handle = Handle(super().allocate(nbytes)[0])
        self.handles.add(handle)
        return handle.address, handle

    def release(self, handle: Any) -> None:
        super().release(handle.address)


class OtherQueue:
    """A queue whose work is done or pending as set, and which fails once if given an error."""

    def __init__(self, is_done: bool = False, error: type[BaseException] | None = None) -> None:
        self.is_done, self.error = is_done, error

    def submit_barrier(self) -> OtherQueue:
        """Return the event, which is the queue itself."""
        self.fail()
        return self

    @property
    def execution_status(self) -> Any:
        self.fail()
        status = load_dpctl().event_status_type
        return status.complete if self.is_done else status.running

    def wait(self) -> None:
        """Finish its work."""
        self.is_done = True

    def fail(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def check(pool: Pool, driver: FaultyDriver) -> None:
    """Check that the pool's figures agree with the driver's."""
    store = pool._core.store
    assert pool.memory_reserved() == driver.reserved == store.source.reserved
    assert pool.memory_allocated() == bytes_in_use(pool)


def bytes_in_use(pool: Pool) -> int:
    return sum(allocation.size for allocation in pool._core.store.in_use.values())


def bytes_of_blocks(pool: Pool) -> int:
    """Bytes of all blocks that are not free."""
    return sum(heap.live for heap in pool._core.store.heaps.values())


def check_cache(pool: Pool) -> None:
    """Check that each export is in one entry only, once, and either recent or cached."""
    for entry in pool._core.cache:
        recent = {*entry.recent, entry.last, entry.before_last} - {_NEVER}
        known = [*entry.recent, *entry.cached]
        assert len(set(known)) == len(known)
        assert not recent & {*entry.cached}
        assert all(export.entry is entry for export in {*recent, *entry.cached})


def actions(pool: Pool) -> list[str]:
    """The actions in the pool's recorded history."""
    return [entry["action"] for entry in pool.snapshot()["device_traces"][0]]


def blocks_of(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return [block for segment in snapshot["segments"] for block in segment["blocks"]]


def random_use(pool: Pool, operations: int) -> list[Any]:
    """Return the tensors and memory left after random allocations and releases."""
    kept: list[Any] = []
    for _ in range(operations):
        if kept and random.random() < 0.45:
            kept.pop(random.randrange(len(kept)))
        elif random.random() < 0.5:
            kept.append(pool.empty(random.choice([1, 100, 100, 5000, 400_000])))
        else:
            kept.append(pool.allocate(random.randrange(1, 3 * MIB)))
    return kept


def once_inside(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Call ``action`` inside the next allocation of any pool, where a finalizer may run."""
    allocate = Heap.allocate

    def allocate_after(heap: Heap, nbytes: int, alignment: int = 512) -> Any:
        monkeypatch.setattr(Heap, "allocate", allocate)
        action()
        return allocate(heap, nbytes, alignment)

    monkeypatch.setattr(Heap, "allocate", allocate_after)
