"""The methods of a pool that report: counters, tables, snapshots, histories."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections import OrderedDict
from typing import Any

from allocator.monitoring.history import History
from allocator.monitoring.snapshot import snapshot
from allocator.monitoring.statistics import (
    FreeMemory,
    Health,
    free_memory,
    health,
    memory_stats,
    memory_stats_as_nested_dict,
)
from allocator.monitoring.summary import summary, summary_html
from allocator.monitoring.timeline import Timeline
from allocator.monitoring.trace import Trace, recorded
from allocator.pool.core import Core
from allocator.pool.counters import Counters
from allocator.pool.sizes import check_bool


class Reports:
    """The base of :class:`Pool` that reports."""

    _core: Core
    _history: History | None = None

    def record(self) -> contextlib.AbstractContextManager[Trace]:
        """Record the allocations and releases of a ``with`` block.

        Meanwhile the reuse cache is off.

        Example:
            >>> from allocator import Pool
            >>> pool = Pool("cpu")
            >>> with pool.record() as trace:
            ...     x = pool.empty(100)
            >>> trace
            <Trace: events 1, allocations 1, most at once 400 B, never freed 400 B>
        """
        return recorded(self._core)

    def memory_allocated(self) -> int:
        """Bytes of blocks in use."""
        return self._core.update().levels["allocated_bytes"][0].current

    def memory_reserved(self) -> int:
        """Bytes taken from the driver."""
        return self._core.update().levels["reserved_bytes"][0].current

    def max_memory_allocated(self) -> int:
        """Most bytes in use at once since the last reset."""
        return self._core.update().levels["allocated_bytes"][0].peak

    def max_memory_reserved(self) -> int:
        """Most bytes taken from the driver at once since the last reset."""
        return self._core.update().levels["reserved_bytes"][0].peak

    def memory_stats(self) -> OrderedDict[str, Any]:
        """Counters by the names that ``torch.cuda.memory_stats`` uses.

        Their meanings are those of torch too; ``allocated`` and ``freed`` are the sums of all rises
        and falls. Counters of features that this pool lacks (num_sync_all_streams,
        num_oom_rejections, oversize, max_split_size) are as in a torch that does not use them.
        hit_rate, fragmentation, internal_waste_bytes and driver_calls are not torch's: see
        :class:`Health`.

        inactive_split, the free blocks in partly used segments, is measured only by this method:
        its peak is the largest value that a call found, its sums are of changes between calls.

        Example:
            >>> from allocator import Pool
            >>> pool = Pool("cpu")
            >>> x = pool.empty(100)
            >>> pool.memory_stats()["requested_bytes.all.current"]
            400
        """
        return memory_stats(*self._figures())

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        """The counters of :meth:`memory_stats` as nested dicts."""
        return memory_stats_as_nested_dict(*self._figures())

    def health(self) -> Health:
        """Fragmentation, waste, hit rate and driver calls as plain numbers."""
        return health(*self._figures())

    def reset_peak_memory_stats(self) -> None:
        """Reset the peaks to the current values."""
        counters = self._core.update()
        with self._core.lock:
            counters.reset_peaks()

    def reset_accumulated_memory_stats(self) -> None:
        """Reset the sums of rises and falls, and the counts, to 0."""
        counters = self._core.update()
        with self._core.lock:
            counters.reset_accumulated()

    def memory_summary(self, abbreviated: bool = False) -> str:
        """A table of the counters, for a terminal.

        Args:
            abbreviated: leave out the separate figures for large and small blocks.

        Raises:
            TypeError: ``abbreviated`` is not a bool.

        Example:
            >>> from allocator import Pool
            >>> print(Pool("cpu").memory_summary().splitlines()[1].split()[0])
            metric
        """
        check_bool(abbreviated, "abbreviated")
        self.memory_stats()  # measures the free blocks in partly used segments
        return summary(self._core.name, self._core.store.counters, abbreviated=abbreviated)

    def _repr_html_(self) -> str:
        """Figures and a bar for each segment, for Jupyter."""
        return summary_html(self._core.name, self.health(), self.snapshot()["segments"])

    def record_history(
        self,
        enabled: bool = True,
        *,
        max_entries: int = 100_000,
        stacks: str | None = "python",
    ) -> None:
        """Record events for :meth:`snapshot`, and stacks for error messages.

        Each call starts a new history; ``enabled=False`` stops recording and keeps the last one. A
        release is recorded, without a stack, when the pool's next call takes it in.

        Args:
            enabled: whether to record.
            max_entries: most entries kept; older ones are dropped.
            stacks: "python", or None to record none.

        Raises:
            TypeError: ``enabled`` is not a bool, or ``max_entries`` not an integer.
            ValueError: ``max_entries`` is negative, or ``stacks`` has another value.

        Example:
            >>> from allocator import Pool
            >>> pool = Pool("cpu")
            >>> pool.record_history()
            >>> x = pool.empty(100)
            >>> [entry["action"] for entry in pool.snapshot()["device_traces"][0]]
            ['segment_alloc', 'alloc']
        """
        check_bool(enabled, "enabled")
        core = self._core
        history = History(core, max_entries, stacks) if enabled else self._history
        if self._history is not None:
            core.remove_hook(self._history)
        self._history = history
        if enabled and history is not None:
            core.add_hook(history)

    def timeline(self, *, max_entries: int = 100_000) -> Timeline:
        """Record the pool's memory over time, in a ``with`` block.

        Args:
            max_entries: most moments kept; older ones are dropped.

        Raises:
            TypeError: ``max_entries`` is not an integer.
            ValueError: it is less than 1.
        """
        return Timeline(self._core, max_entries)

    def dump_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write a :meth:`snapshot` to a file for https://pytorch.org/memory_viz.

        Args:
            path: path of the file, which is overwritten.
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
        core = self._core
        with core.lock, core.reentrancy as is_outermost:
            if is_outermost:
                core.drain()
                core.flush_cache()
            return snapshot(core, self._history)

    def _figures(self) -> tuple[Counters, FreeMemory]:
        core = self._core
        counters = core.update()
        with core.lock:
            cached = {id(export.owner) for entry in core.cache for export in entry.cached}
            return counters, free_memory(core.store, cached)
