"""Statistics of a pool, by torch's names and as a summary of its health."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from typing import Any, NamedTuple

from allocator.pool.counters import FACTS, INACTIVE, TIERS, Counters
from allocator.pool.store import Store


class FreeMemory(NamedTuple):
    """The free memory of the segments.

    Tensors in the reuse cache count as free: a request that finds no room gets their memory.
    """

    nbytes: int
    largest: int
    """Bytes of the longest contiguous range."""
    inactive: list[tuple[tuple[int, int], bool]]
    """Number and bytes of the free blocks of each partly used segment, and whether it is small."""


def free_memory(store: Store, cached: Set[int]) -> FreeMemory:
    """The free memory of a pool; ``cached`` are ids of the allocations in its reuse cache."""
    nbytes = largest = 0
    inactive = []
    for heap in store.heaps.values():
        for segment in heap.segments:
            sizes, length, is_partly_used = [], 0, False
            for block in segment.blocks():
                if block.is_free or id(block.tag) in cached:
                    sizes.append(block.size)
                    length += block.size
                    largest = max(largest, length)
                else:
                    length, is_partly_used = 0, True
            nbytes += sum(sizes)
            if is_partly_used:
                inactive.append(((len(sizes), sum(sizes)), segment.is_small))
    return FreeMemory(nbytes, largest, inactive)


class Health(NamedTuple):
    """How well a pool uses its memory, as plain numbers.

    Example:
        >>> from allocator import Pool
        >>> pool = Pool("cpu")
        >>> x = pool.empty(1000)
        >>> health = pool.health()
        >>> health.allocated_bytes, health.internal_waste_bytes, health.driver_calls
        (4096, 96, 1)
    """

    allocated_bytes: int
    """Bytes of blocks in use."""
    requested_bytes: int
    """Bytes that were asked for, of the blocks in use."""
    reserved_bytes: int
    """Bytes taken from the driver."""
    free_bytes: int
    """Bytes of free blocks."""
    largest_free_bytes: int
    """Bytes of the longest free range."""
    fragmentation: float
    """1 - largest_free_bytes / free_bytes; 0 if nothing is free."""
    internal_waste_bytes: int
    """allocated_bytes - requested_bytes."""
    hit_rate: float
    """Share of the allocations that needed no segment from the driver; 1 if there were none."""
    allocations: int
    """Allocations since the accumulated statistics were reset, as all counts below."""
    driver_calls: int
    """Segments taken from the driver and returned to it."""
    retries: int
    """Allocations that found no room and were retried after a garbage collection."""
    ooms: int
    """Allocations that failed."""

    def prometheus(self, **labels: object) -> str:
        """The numbers in the text format that Prometheus reads.

        Args:
            labels: labels of every number, such as ``rank=0``.

        Example:
            >>> from allocator import Pool
            >>> print(Pool("cpu").health().prometheus(pool="main").splitlines()[1])
            allocator_allocated_bytes{pool="main"} 0
        """
        pairs = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
        where = f"{{{pairs}}}" if pairs else ""
        lines = []
        for field, value in self._asdict().items():
            is_count = field in _COUNTS
            name = f"allocator_{field}_total" if is_count else f"allocator_{field}"
            lines.append(f"# TYPE {name} {'counter' if is_count else 'gauge'}")
            lines.append(f"{name}{where} {value}")
        return "\n".join(lines) + "\n"


_OURS = ("hit_rate", "fragmentation", "internal_waste_bytes", "driver_calls")
_COUNTS = ("allocations", "driver_calls", "retries", "ooms")


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def health(counters: Counters, free: FreeMemory) -> Health:
    """The figures for these counters and this free memory."""
    total = {metric: by_tier[0] for metric, by_tier in counters.levels.items()}
    allocations, segments = total["allocation"], total["segment"]
    allocated, requested = total["allocated_bytes"], total["requested_bytes"]
    return Health(
        allocated_bytes=allocated.current,
        requested_bytes=requested.current,
        reserved_bytes=total["reserved_bytes"].current,
        free_bytes=free.nbytes,
        largest_free_bytes=free.largest,
        fragmentation=1 - free.largest / free.nbytes if free.nbytes else 0.0,
        internal_waste_bytes=allocated.current - requested.current,
        hit_rate=1 - counters.misses / allocations.allocated if allocations.allocated else 1.0,
        allocations=allocations.allocated,
        driver_calls=segments.allocated + segments.freed,
        retries=counters.retries,
        ooms=counters.ooms,
    )


def memory_stats_as_nested_dict(counters: Counters, free: FreeMemory) -> dict[str, Any]:
    """The counters by torch's names, and figures that torch does not have."""
    counters.recount(INACTIVE, free.inactive)
    segments = counters.levels["segment"][0]
    figures = health(counters, free)._asdict()
    return {
        metric: {
            tier: {fact: getattr(level, fact) for fact in FACTS}
            for tier, level in zip(TIERS, by_tier)
        }
        for metric, by_tier in counters.levels.items()
    } | {
        "num_alloc_retries": counters.retries,
        "num_ooms": counters.ooms,
        "num_device_alloc": segments.allocated,
        "num_device_free": segments.freed,
        # Features that this pool lacks, as in a torch that does not use them.
        "num_oom_rejections": 0,
        "num_sync_all_streams": 0,
        "oversize_allocations": dict.fromkeys(FACTS, 0),
        "oversize_segments": dict.fromkeys(FACTS, 0),
        "max_split_size": -1,
        # Not torch's.
        **{name: figures[name] for name in _OURS},
    }


def memory_stats(counters: Counters, free: FreeMemory) -> OrderedDict[str, Any]:
    """The same counters in a flat dict, sorted by name, such as "allocated_bytes.all.peak"."""
    return OrderedDict(sorted(_flat("", memory_stats_as_nested_dict(counters, free))))


def _flat(prefix: str, nested: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for name, value in nested.items():
        if isinstance(value, dict):
            pairs += _flat(f"{prefix}{name}.", value)
        else:
            pairs.append((prefix + name, value))
    return pairs
