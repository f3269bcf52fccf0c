"""What a pool tells of itself: counters, tables, snapshots, histories."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

from allocator.watching.history import History, with_history
from allocator.watching.snapshot import snapshot
from allocator.watching.statistics import (
    FreeRoom,
    Health,
    Tally,
    free_room,
    health,
    memory_stats,
    memory_stats_as_nested_dict,
)
from allocator.watching.summary import summary, summary_html
from allocator.watching.timeline import Timeline
from allocator.watching.trace import Trace, recorded

if TYPE_CHECKING:
    from allocator.pool.pool import Pool


class Reports:
    """The base of :class:`Pool` that only looks."""

    _history: History | None

    def record(self) -> contextlib.AbstractContextManager[Trace]:
        """Write down, in the block, what is allocated and released.

        Meanwhile no tensor takes the place of the last one without a look at the books.

        Example:
            >>> from allocator import Pool
            >>> pool = Pool("cpu")
            >>> with pool.record() as trace:
            ...     x = pool.empty(100)
            >>> trace
            <Trace: events 1, allocations 1, most at once 400 B, never freed 400 B>
        """
        return recorded(self._pool)

    def memory_allocated(self) -> int:
        """Bytes in use, in whole blocks."""
        return self._pool.tally().levels["allocated_bytes"][0].current

    def memory_reserved(self) -> int:
        """Bytes taken from the driver."""
        return self._pool.tally().levels["reserved_bytes"][0].current

    def max_memory_allocated(self) -> int:
        """The most bytes that were in use at once since the last reset."""
        return self._pool.tally().levels["allocated_bytes"][0].peak

    def max_memory_reserved(self) -> int:
        """The most bytes that were taken from the driver since the last reset."""
        return self._pool.tally().levels["reserved_bytes"][0].peak

    def memory_stats(self) -> OrderedDict[str, Any]:
        """Counters by the names that ``torch.cuda.memory_stats`` uses.

        ``{metric}.{tier}.{fact}``, where the metric is one of allocation, allocated_bytes,
        requested_bytes, active, active_bytes, segment, reserved_bytes, inactive_split and
        inactive_split_bytes; the tier all, large_pool or small_pool; the fact current, peak,
        allocated (the sum of all rises) or freed. Then num_alloc_retries, num_ooms,
        num_device_alloc and num_device_free. What torch counts and this pool never does
        (num_sync_all_streams, num_oom_rejections, oversize, max_split_size) is as in a torch that
        does not either. hit_rate, fragmentation, internal_waste_bytes and driver_calls are ours.

        inactive_split, the free blocks in segments that are partly in use, is looked at only here:
        its peak is the most that a call of this method saw, and its sums are of the changes from
        one call to the next.

        Example:
            >>> from allocator import Pool
            >>> pool = Pool("cpu")
            >>> x = pool.empty(100)
            >>> pool.memory_stats()["requested_bytes.all.current"]
            400
        """
        return memory_stats(*self._figures())

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        """The same as dicts within dicts; see :meth:`memory_stats`."""
        return memory_stats_as_nested_dict(*self._figures())

    def health(self) -> Health:
        """Fragmentation, waste, hits and the driver's calls, as plain numbers."""
        return health(*self._figures())

    def reset_peak_memory_stats(self) -> None:
        """Start the peaks anew, from what is current."""
        tally = self._pool.tally()
        with self._pool._lock:
            tally.reset_peaks()

    def reset_accumulated_memory_stats(self) -> None:
        """Start the sums of rises and falls, and the counts, anew, from 0."""
        tally = self._pool.tally()
        with self._pool._lock:
            tally.reset_accumulated()

    def memory_summary(self, abbreviated: bool = False) -> str:
        """A table of the counters, for a terminal.

        Args:
            abbreviated: does not tell large and small blocks apart.

        Example:
            >>> from allocator import Pool
            >>> print(Pool("cpu").memory_summary().splitlines()[1].split()[0])
            metric
        """
        self.memory_stats()  # looks at what is idle beside blocks in use
        return summary(self._pool.name, self._pool._store.tally, abbreviated=abbreviated)

    def _repr_html_(self) -> str:
        """For Jupyter: figures, and a bar for each segment."""
        return summary_html(self._pool.name, self.health(), self.snapshot()["segments"])

    def record_history(
        self,
        enabled: bool = True,
        *,
        max_entries: int = 100_000,
        stacks: str | None = "python",
    ) -> None:
        """Record allocations for :meth:`snapshot`, and stacks for errors to name the places.

        Each call starts anew; with ``enabled=False`` nothing more is recorded, and what was stays.
        A release is recorded when the pool takes it in, at its next call, and has no stack.

        Args:
            enabled: whether to record.
            max_entries: that are kept, the last ones.
            stacks: "python", or None for none.

        Raises:
            TypeError: ``max_entries`` is no integer.
            ValueError: it is negative, or ``stacks`` is something else.

        Example:
            >>> from allocator import Pool
            >>> pool = Pool("cpu")
            >>> pool.record_history()
            >>> x = pool.empty(100)
            >>> [entry["action"] for entry in pool.snapshot()["device_traces"][0]]
            ['segment_alloc', 'alloc']
        """
        history = History(max_entries, stacks) if enabled else self._history
        if self._history is not None:
            self._pool.remove_hook(self._history)
        self._history = history
        if enabled and history is not None:
            self._pool.add_hook(history)

    def timeline(self, *, max_entries: int = 100_000) -> Timeline:
        """Record what the pool holds over time, in a ``with`` block.

        Args:
            max_entries: moments that are kept, the last ones.

        Raises:
            TypeError: it is no integer.
            ValueError: it is less than 1.
        """
        return Timeline(self._pool, max_entries)

    def dump_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a :meth:`snapshot` to a file for https://pytorch.org/memory_viz.

        Args:
            path: of the file, which is overwritten.
        """
        with open(path, "wb") as file:
            pickle.dump(self.snapshot(), file, protocol=4)  # the newest that the page reads

    def snapshot(self) -> dict[str, Any]:
        """Segments, blocks and history in the format that https://pytorch.org/memory_viz opens.

        :meth:`dump_snapshot` writes it for that page; ``torch.cuda._memory_viz`` reads it too.

        Example:
            >>> from allocator import Pool
            >>> pool = Pool("cpu")
            >>> x = pool.empty(100)
            >>> pool.snapshot()["segments"][0]["blocks"][0]["state"]
            'active_allocated'
        """
        pool = self._pool
        with pool._lock, pool._section as is_outermost:
            if is_outermost:
                pool._drain()
                pool._flush_shelves()
            return with_history(snapshot(pool._store), pool, self._history)

    @property
    def _pool(self) -> Pool:
        return cast("Pool", self)

    def _figures(self) -> tuple[Tally, FreeRoom]:
        pool = self._pool
        tally = pool.tally()
        with pool._lock:
            ready = {id(export.owner) for shelf in pool._shelves for export in shelf.ready}
            return tally, free_room(pool._store, ready)
