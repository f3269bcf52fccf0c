"""What a pool's counters and blocks add up to: torch's statistics and a summary of its health."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Set
from typing import Any, NamedTuple

from allocator.pool.blocks import Block, Segment
from allocator.pool.counters import FACTS, TIERS, Level, Split, Tally
from allocator.pool.store import Store


class FreeRoom(NamedTuple):
    """What is free of the segments.

    Tensors that are kept ready for the next of their shape are free here: their memory is given
    to any other request that finds no room.
    """

    nbytes: int
    largest: int
    """Bytes of the longest stretch."""
    large_split: Split
    small_split: Split


def free_room(store: Store, shelved: Set[int]) -> FreeRoom:
    """What is free now, from a walk over all blocks.

    Args:
        store: the pool's books.
        shelved: the ids of the allocations that are kept ready.
    """
    nbytes = largest = 0
    splits = {True: Split(0, 0), False: Split(0, 0)}
    for heap in store.heaps.values():
        for segment in heap.segments:
            sizes, stretch, is_part_used = _idle(segment, shelved)
            nbytes += sum(sizes)
            largest = max(largest, stretch)
            if is_part_used:
                blocks, before = splits[segment.is_small]
                splits[segment.is_small] = Split(blocks + len(sizes), before + sum(sizes))
    return FreeRoom(nbytes, largest, splits[False], splits[True])


def _idle(segment: Segment, shelved: Set[int]) -> tuple[list[int], int, bool]:
    """The sizes of its idle blocks, the longest stretch of them, and whether others are in use."""
    sizes: list[int] = []
    stretch = longest = 0
    is_part_used = False
    block: Block | None = segment.first
    while block is not None:
        if block.is_free or id(block.tag) in shelved:
            sizes.append(block.size)
            stretch += block.size
            longest = max(longest, stretch)
        else:
            stretch = 0
            is_part_used = True
        block = block.next
    return sizes, longest, is_part_used


class Health(NamedTuple):
    """How well a pool does, as plain numbers.

    Example:
        >>> from allocator import Pool
        >>> pool = Pool("cpu")
        >>> x = pool.empty(1000)
        >>> health = pool.health()
        >>> health.allocated_bytes, health.internal_waste_bytes, health.driver_calls
        (4096, 96, 1)
    """

    allocated_bytes: int
    """In use, in whole blocks."""
    requested_bytes: int
    """In use, as they were asked for."""
    reserved_bytes: int
    """Taken from the driver."""
    free_bytes: int
    """Free blocks in the segments."""
    largest_free_bytes: int
    """The longest free stretch."""
    fragmentation: float
    """1 - largest_free_bytes / free_bytes; 0 where nothing is free."""
    internal_waste_bytes: int
    """allocated_bytes - requested_bytes."""
    hit_rate: float
    """The part of the allocations for which the driver gave no segment; 1 where there were none."""
    allocations: int
    """Since the accumulated statistics were last reset, as the counts below."""
    driver_calls: int
    """Segments that the driver gave and got back."""
    retries: int
    """Allocations that found no room and were tried again after a garbage collection."""
    ooms: int
    """Allocations that found no room at all."""

    def prometheus(self, **labels: str) -> str:
        """The numbers in the text format that Prometheus reads.

        Args:
            labels: of every number.

        Example:
            >>> from allocator import Pool
            >>> print(Pool("cpu").health().prometheus(pool="main").splitlines()[1])
            allocator_allocated_bytes{pool="main"} 0
        """
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
        where = f"{{{pairs}}}" if pairs else ""
        lines = []
        for field, value in self._asdict().items():
            is_count = field in _COUNTS
            name = f"allocator_{field}_total" if is_count else f"allocator_{field}"
            lines.append(f"# TYPE {name} {'counter' if is_count else 'gauge'}")
            lines.append(f"{name}{where} {value}")
        return "\n".join(lines) + "\n"


_COUNTS = ("allocations", "driver_calls", "retries", "ooms")


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def health(tally: Tally, room: FreeRoom) -> Health:
    """The figures of a pool with these counters and this free room."""
    total = {metric: by_tier[0] for metric, by_tier in tally.levels.items()}
    allocations, segments = total["allocation"], total["segment"]
    allocated, requested = total["allocated_bytes"], total["requested_bytes"]
    return Health(
        allocated_bytes=allocated.current,
        requested_bytes=requested.current,
        reserved_bytes=total["reserved_bytes"].current,
        free_bytes=room.nbytes,
        largest_free_bytes=room.largest,
        fragmentation=1 - room.largest / room.nbytes if room.nbytes else 0.0,
        internal_waste_bytes=allocated.current - requested.current,
        hit_rate=1 - tally.misses / allocations.allocated if allocations.allocated else 1.0,
        allocations=allocations.allocated,
        driver_calls=segments.allocated + segments.freed,
        retries=tally.retries,
        ooms=tally.ooms,
    )


def memory_stats_as_nested_dict(tally: Tally, room: FreeRoom) -> dict[str, Any]:
    """The figures by torch's names, and those of ours that torch has not."""
    tally.set_splits(room.large_split, room.small_split)
    segments = tally.levels["segment"][0]
    figures = health(tally, room)
    return {
        metric: {tier: _facts(level) for tier, level in zip(TIERS, by_tier)}
        for metric, by_tier in tally.levels.items()
    } | {
        "num_alloc_retries": tally.retries,
        "num_ooms": tally.ooms,
        "num_device_alloc": segments.allocated,
        "num_device_free": segments.freed,
        # What this policy has not, as torch says it when it is off.
        "num_oom_rejections": 0,
        "num_sync_all_streams": 0,
        "oversize_allocations": dict.fromkeys(FACTS, 0),
        "oversize_segments": dict.fromkeys(FACTS, 0),
        "max_split_size": -1,
        # Ours.
        "hit_rate": figures.hit_rate,
        "fragmentation": figures.fragmentation,
        "internal_waste_bytes": figures.internal_waste_bytes,
        "driver_calls": figures.driver_calls,
    }


def _facts(level: Level) -> dict[str, int]:
    return {fact: getattr(level, fact) for fact in FACTS}


def memory_stats(tally: Tally, room: FreeRoom) -> OrderedDict[str, Any]:
    """The same in one level, such as "allocated_bytes.all.peak", in the order of the names."""
    return OrderedDict(sorted(_flat("", memory_stats_as_nested_dict(tally, room))))


def _flat(prefix: str, nested: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for name, value in nested.items():
        if isinstance(value, dict):
            pairs += _flat(f"{prefix}{name}.", value)
        else:
            pairs.append((prefix + name, value))
    return pairs
