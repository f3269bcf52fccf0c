"""How much of what: now, at most, and in all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NamedTuple

from allocator.pool.blocks import Block, Segment

if TYPE_CHECKING:
    from allocator.pool.allocation import Allocation
    from allocator.pool.store import Store

METRICS = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "active",
    "active_bytes",
    "segment",
    "reserved_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
TIERS = ("all", "large_pool", "small_pool")
FACTS = ("current", "peak", "allocated", "freed")


class Level:
    """A quantity that rises and falls."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = 0
        self.peak = 0
        self.allocated = 0
        """the sum of all rises."""
        self.freed = 0
        """the sum of all falls."""

    def rise(self, amount: int) -> None:
        """Add an amount."""
        self.allocated += amount
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current

    def fall(self, amount: int) -> None:
        """Subtract an amount."""
        self.freed += amount
        self.current -= amount

    def become(self, amount: int) -> None:
        """Rise or fall to ``amount``."""
        if amount > self.current:
            self.rise(amount - self.current)
        else:
            self.fall(self.current - amount)

    def reset_peak(self) -> None:
        """Start the peak anew, from what is current."""
        self.peak = self.current

    def reset_accumulated(self) -> None:
        """Start both sums anew, from 0."""
        self.allocated = self.freed = 0

    def pass_through(self, amount: int) -> None:
        """Count a rise that followed an equal fall."""
        self.allocated += amount
        self.freed += amount


class Tally:
    """The levels of a pool: each metric of all blocks, of large ones and of small ones."""

    def __init__(self) -> None:
        self.levels = {metric: tuple(Level() for _ in TIERS) for metric in METRICS}
        self._given = [self.levels[name] for name in METRICS[:3]]
        self._active = [self.levels[name] for name in METRICS[3:5]]
        self._reserved = [self.levels[name] for name in METRICS[5:7]]
        self._splits = [self.levels[name] for name in METRICS[7:]]
        self.misses = 0
        """allocations for which the driver was asked."""
        self.retries = 0
        """times that an allocation found no room and was tried again."""
        self.ooms = 0
        """times that it found none then either."""

    def gave(self, size: int, requested: int, is_small: bool) -> None:
        """A block of so many bytes was given for a request."""
        self._rise(self._given, (1, size, requested), is_small)
        self._rise(self._active, (1, size), is_small)

    def got_back(self, size: int, requested: int, is_small: bool) -> None:
        """The block is no longer in use, though a queue may still be."""
        self._fall(self._given, (1, size, requested), is_small)

    def is_free(self, size: int, is_small: bool) -> None:
        """The block may be given again."""
        self._fall(self._active, (1, size), is_small)

    def grew(self, size: int, is_small: bool) -> None:
        """The driver gave a segment."""
        self._rise(self._reserved, (1, size), is_small)

    def shrank(self, size: int, is_small: bool) -> None:
        """The driver got a segment back."""
        self._fall(self._reserved, (1, size), is_small)

    def reused(self, count: int, size: int, requested: int, is_small: bool) -> None:
        """Blocks were given again so many times just as they came back."""
        for levels, amount in zip(self._given, (1, size, requested)):
            for level in (levels[0], levels[1 + is_small]):
                level.pass_through(count * amount)
        for levels, amount in zip(self._active, (1, size)):
            for level in (levels[0], levels[1 + is_small]):
                level.pass_through(count * amount)

    def recount(
        self, given: Iterable[Allocation], active: Iterable[Allocation], room: Mapping[bool, Split]
    ) -> None:
        """Make the current values what they are, after an interrupted call.

        Args:
            given: the allocations in use.
            active: those whose blocks cannot be given yet.
            room: the segments of large blocks and of small ones, by whether they are small.
        """
        for levels, of in (
            (self._given, [((1, a.size, a.nbytes), a.is_small) for a in given]),
            (self._active, [((1, a.size), a.is_small) for a in active]),
            (self._reserved, [(amounts, is_small) for is_small, amounts in room.items()]),
        ):
            for i, level in enumerate(levels):
                small = sum(amounts[i] for amounts, is_small in of if is_small)
                every = sum(amounts[i] for amounts, _ in of)
                for tier, amount in zip(level, (every, every - small, small)):
                    tier.become(amount)

    def saw_splits(self, large: Split, small: Split) -> None:
        """So much lies idle beside blocks that are in use."""
        both = Split(large.blocks + small.blocks, large.nbytes + small.nbytes)
        for levels, amounts in zip(self._splits, zip(both, large, small)):
            for level, amount in zip(levels, amounts):
                level.become(amount)

    def reset_peaks(self) -> None:
        """Start the peaks anew, from what is current."""
        for by_tier in self.levels.values():
            for level in by_tier:
                level.reset_peak()

    def reset_accumulated(self) -> None:
        """Start the sums and the counts anew, from 0."""
        self.misses = self.retries = self.ooms = 0
        for by_tier in self.levels.values():
            for level in by_tier:
                level.reset_accumulated()

    @staticmethod
    def _rise(metrics: list[tuple[Level, ...]], amounts: tuple[int, ...], is_small: bool) -> None:
        for levels, amount in zip(metrics, amounts):
            levels[0].rise(amount)
            levels[1 + is_small].rise(amount)

    @staticmethod
    def _fall(metrics: list[tuple[Level, ...]], amounts: tuple[int, ...], is_small: bool) -> None:
        for levels, amount in zip(metrics, amounts):
            levels[0].fall(amount)
            levels[1 + is_small].fall(amount)


class Split(NamedTuple):
    """Free blocks in segments of which a part is in use."""

    blocks: int
    nbytes: int


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
    tally.saw_splits(room.large_split, room.small_split)
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
