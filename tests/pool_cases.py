"""The options of a pool, one row each. The contract tests read nothing else about them."""

from __future__ import annotations

import dataclasses
from typing import Any

from allocator import Pool, Rules
from tests.allocator.helpers import KIB, MIB, AligningDriver


@dataclasses.dataclass(frozen=True)
class PoolCase:
    """One option of a pool, and how it changes the figures."""

    name: str
    options: dict[str, Any]
    on_device: bool = False
    """Whether the pool has device memory, instead of a driver of the tests."""
    margin: int = 0
    """Bytes before and after each allocation."""
    arena: int = 0
    """Bytes that are reserved during the pool's whole life."""
    limit: int | None = None
    """Most bytes that may be reserved."""
    reuses: bool = True
    """Whether released tensors are cached."""

    def make(self) -> Pool:
        driver = {} if self.on_device else {"driver": AligningDriver()}
        return Pool("cpu", name=self.name, **driver, **self.options)

    def size(self, nbytes: int) -> int:
        """The size of the block for a request of at most 1 MiB."""
        rounding = self.options.get("rules", Rules()).rounding
        return -(-(nbytes + 2 * self.margin) // rounding) * rounding

    def reserved_size(self, nbytes: int) -> int:
        """The bytes that a request of at most 1 MiB takes from a reservation."""
        return -(-(nbytes + 2 * self.margin) // 512) * 512


POOL_CASES = (
    PoolCase("plain", {}),
    PoolCase("device", {"kind": "device"}, on_device=True),
    PoolCase("shared", {"kind": "shared"}, on_device=True),
    PoolCase("host", {"kind": "host"}, on_device=True),
    PoolCase("limit", {"limit": "32MiB"}, limit=32 * MIB),
    PoolCase("fraction", {"fraction": 1 / 32}, limit=32 * MIB),
    PoolCase("debug", {"debug": True}, margin=512, reuses=False),
    PoolCase(
        "stable addresses",
        {"stable_addresses": "32MiB"},
        arena=32 * MIB,
        limit=32 * MIB,
        reuses=False,
    ),
    PoolCase("idle", {"idle_seconds": 3600}),
    PoolCase("large rounding", {"rules": Rules(rounding=4 * KIB)}),
    PoolCase("no slack", {"rules": Rules(slack=0, over_reserve=0.0, small_limit=0)}),
    PoolCase(
        "debug, stable",
        {"debug": True, "stable_addresses": "32MiB"},
        margin=512,
        arena=32 * MIB,
        limit=32 * MIB,
        reuses=False,
    ),
    PoolCase(
        "debug, limit", {"debug": True, "limit": "32MiB"}, margin=512, limit=32 * MIB, reuses=False
    ),
)
