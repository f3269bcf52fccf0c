"""Drivers over host memory, which fail when they are told to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from allocator import Pool

MIB = 2**20


class FaultyDriver:
    """Host memory of ctypes, which fails when it is told to."""

    name = "faulty"
    capacity = 100 * MIB
    is_host_accessible = True
    dlpack_device = (1, 0)
    queue: Any = None

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
            raise self.error
        buffer = ctypes.create_string_buffer(nbytes + 512)
        address = -(-ctypes.addressof(buffer) // 512) * 512
        self.held[address] = nbytes, buffer
        return address, address

    def release(self, handle: Any) -> None:
        del self.held[handle]

    def read(self, address: int, nbytes: int) -> bytes:
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, data: memoryview) -> None:
        ctypes.memmove(address, bytes(data), data.nbytes)


class AligningDriver(FaultyDriver):
    """As the driver does with large memory."""

    capacity = 1024 * MIB
    shift = 0

    def allocate(self, nbytes: int) -> tuple[int, Any]:
        self.calls += 1
        if self.fails(self, nbytes):
            raise self.error
        buffer = ctypes.create_string_buffer(nbytes + 2 * MIB)
        address = -(-ctypes.addressof(buffer) // (2 * MIB)) * 2 * MIB + self.shift
        self.held[address] = nbytes, buffer
        return address, address


def check(pool: Pool, driver: FaultyDriver) -> None:
    """The pool's figures agree with the driver's."""
    assert pool.memory_reserved() == driver.reserved == pool._core.store.source.reserved
    store = pool._core.store
    assert pool.memory_allocated() == sum(a.size for a in store.in_use.values())
