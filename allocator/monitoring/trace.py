"""Traces: recorded allocations and releases that can be saved, loaded and replayed."""

from __future__ import annotations

import contextlib
import csv
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args, overload

from allocator.monitoring.hooks import Hook
from allocator.monitoring.replay import Replay, replay
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.sizes import as_nbytes
from allocator.runtime.formatting import size_text

if TYPE_CHECKING:
    import torch

Action = Literal["allocate", "allocate failure", "free"]
_ACTIONS: tuple[str, ...] = get_args(Action)
_COLUMNS = ["Thread", "Time", "Action", "Pointer", "Size", "Stream"]
_TIME = re.compile(r"(\d+):(\d\d):(\d\d)[.:](\d{6})", re.ASCII)
_SECOND = 1_000_000


class Event(NamedTuple):
    """One event of a trace."""

    thread: int
    """id of the calling thread; for a release, of the thread in which the pool noticed it."""
    time: int
    """time in microseconds; only differences mean anything."""
    action: Action
    """"allocate", "allocate failure" or "free"."""
    pointer: int
    """address of the memory."""
    size: int
    """bytes asked for."""
    stream: int
    """0 for the pool's own queue, other numbers for other queues."""


class Trace(Sequence[Event]):
    """A sequence of allocations and releases.

    ``with pool.record() as trace``, :meth:`load` and :meth:`from_profiler` make traces.

    Args:
        events: events in order.

    Raises:
        ValueError: events contradict each other, for example free memory that was not allocated.

    Example:
        >>> trace = Trace([Event(1, 0, "allocate", 512, 100, 0), Event(1, 9, "free", 512, 100, 0)])
        >>> trace
        <Trace: events 2, allocations 1, most at once 100 B, never freed 0 B>
        >>> trace.replay().peak_live
        512
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.ignored = 0
        """number of releases left out, of memory allocated before the recording began."""
        self._events: list[Event] = []
        self._live: dict[int, Event] = {}
        for event in events:
            self._add(event)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Load a trace from a log file of RAPIDS RMM, or one written by :meth:`save`.

        Args:
            path: path of the file.

        Raises:
            ValueError: a line has other columns, an unknown action or a bad number, or contradicts
                the lines before; the message has its number.
        """
        trace = cls()
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            rows = csv.reader(file)
            try:
                if next(rows, []) != _COLUMNS:
                    raise ValueError(f"the first line is not {','.join(_COLUMNS)}")
                for row in rows:
                    trace._add(_parsed(row))
            except (ValueError, csv.Error) as error:
                line = max(rows.line_num, 1)
                raise ValueError(f"{os.fspath(path)}, line {line}: {error}") from None
        return trace

    @classmethod
    def from_profiler(cls, profiler: torch.profiler.profile) -> Trace:
        """The CPU allocations of torch that a profiler recorded.

        If an address is allocated again, a release that the profiler missed is assumed before it.

        Args:
            profiler: a finished ``torch.profiler.profile(profile_memory=True)``.

        Raises:
            ValueError: the profiler has not finished, or did not record memory.
        """
        trace = cls()
        changes = _memory_events(profiler)
        for change in changes:
            now = (change.start_time_ns - changes[0].start_time_ns) // 1000
            pointer, size = change.extra_fields.ptr, change.extra_fields.alloc_size
            if size < 0 or pointer in trace._live:
                trace._add_free(change.start_tid, now, pointer)
            if size > 0:
                trace._add(Event(change.start_tid, now, "allocate", pointer, size, 0))
        return trace

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the CSV format of RAPIDS RMM's logging, which its replay benchmark reads too.

        Args:
            path: path of the file, which is overwritten.
        """
        with open(path, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(_COLUMNS)
            for thread, now, action, pointer, size, stream in self._events:
                writer.writerow([thread, _clock(now), action, hex(pointer), size, stream])

    def replay(self, target: Any = None, *, touch: bool = False) -> Replay:
        """Repeat the trace; see :func:`replay`.

        Args:
            target: a :class:`Pool`, or the :class:`Rules` of one; the default rules if None.
            touch: write to all memory; for pools only.
        """
        return replay(self, target, touch=touch)

    @property
    def leaked(self) -> list[Event]:
        """The allocations that were never freed."""
        return list(self._live.values())

    @property
    def peak_requested(self) -> int:
        """Most bytes requested at once: no pool needs less."""
        live = peak = 0
        for event in self._events:
            if event.action == "allocate":
                live += event.size
                peak = max(peak, live)
            elif event.action == "free":
                live -= event.size
        return peak

    def __len__(self) -> int:
        return len(self._events)

    @overload
    def __getitem__(self, index: int) -> Event: ...
    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...
    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        return self._events[index]

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __repr__(self) -> str:
        allocations = sum(event.action == "allocate" for event in self._events)
        leaked = sum(event.size for event in self.leaked)
        return (
            f"<Trace: events {len(self):,}, allocations {allocations:,}, most at once "
            f"{size_text(self.peak_requested)}, never freed {size_text(leaked)}>"
        )

    def _add(self, event: Event) -> None:
        """Append an event; ValueError if it contradicts the events before."""
        if event.action not in _ACTIONS:
            raise ValueError(f"action {event.action!r} is not one of {', '.join(_ACTIONS)}")
        as_nbytes(event.size)
        held = self._live.get(event.pointer)
        if not event.size:
            pass  # zero bytes take no memory, and may have any address
        elif event.action == "allocate":
            if held is not None:
                raise ValueError(f"{event.pointer:#x} is allocated again before it was freed")
            self._live[event.pointer] = event
        elif event.action == "free":
            if held is None:
                raise ValueError(f"{event.pointer:#x} is freed, but is not allocated")
            if held.size != event.size:
                raise ValueError(
                    f"{event.size} bytes are freed at {event.pointer:#x}, where {held.size} were "
                    "allocated"
                )
            del self._live[event.pointer]
        self._events.append(event)

    def _add_free(self, thread: int, now: int, pointer: int) -> None:
        """Append a release, or count one of memory allocated before the recording."""
        held = self._live.get(pointer)
        if held is None:
            self.ignored += 1
        else:
            self._add(Event(thread, now, "free", pointer, held.size, held.stream))


@contextlib.contextmanager
def recorded(core: Core) -> Iterator[Trace]:
    """The trace of a pool's allocations and releases in the ``with`` block."""
    recorder = _Recorder()
    core.update()  # takes in what was released before
    core.add_hook(recorder)
    try:
        yield recorder.trace
    finally:
        try:
            core.update()  # takes in what was released in the block
        finally:
            recorder.is_over = True
            core.remove_hook(recorder)


class _Recorder(Hook):
    """Records a pool's events."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.is_over = False
        """whether to ignore events: threads inside an allocation still report it, but no releases
        are reported any more."""
        self._start = time.perf_counter_ns()

    def allocated(self, pool: Any, allocation: Allocation) -> None:
        if self.is_over:
            return
        thread, now = threading.get_native_id(), self._now()
        if allocation.address in self.trace._live:  # an interrupt hid its release from the hooks
            self.trace._add_free(thread, now, allocation.address)
        place = allocation.address, allocation.nbytes, allocation.stream
        self.trace._add(Event(thread, now, "allocate", *place))

    def released(self, pool: Any, allocation: Allocation) -> None:
        if not self.is_over:
            self.trace._add_free(threading.get_native_id(), self._now(), allocation.address)

    def out_of_memory(self, pool: Any, nbytes: int) -> bool:
        if not self.is_over:
            thread, now = threading.get_native_id(), self._now()
            self.trace._add(Event(thread, now, "allocate failure", 0, nbytes, 0))
        return False

    def _now(self) -> int:
        return (time.perf_counter_ns() - self._start) // 1000


def _memory_events(profiler: torch.profiler.profile) -> list[Any]:
    """The profiler's events of the CPU's memory, in order."""
    from torch._C._profiler import _EventType

    finished = getattr(profiler.profiler, "kineto_results", None)
    if finished is None:
        raise ValueError("the profiler has not finished; leave its `with` block first")
    if not profiler.profile_memory:
        raise ValueError("the profiler did not record memory; use profile(profile_memory=True)")
    found = []
    waiting = list(finished.experimental_event_tree())
    for event in waiting:  # while the list grows
        waiting += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            found.append(event)
    return sorted(found, key=lambda event: event.start_time_ns)


def _parsed(row: list[str]) -> Event:
    """The event of a line of a file; ValueError if it is malformed."""
    if len(row) != len(_COLUMNS):
        raise ValueError(f"{len(row)} columns, not the {len(_COLUMNS)} of {','.join(_COLUMNS)}")
    thread, clock, action, pointer, size, stream = row
    return Event(
        _number("Thread", thread, 10),
        _microseconds(clock),
        cast(Action, action),  # which Trace checks
        0 if pointer == "(nil)" else _number("Pointer", pointer, 16),  # as C prints it
        _number("Size", size, 10),
        _number("Stream", stream, 16 if stream.startswith("0x") else 10),
    )


def _number(column: str, text: str, base: int) -> int:
    # int() would also take signs, blanks and underscores.
    if text.isascii() and text.isalnum():
        with contextlib.suppress(ValueError):
            return int(text, base)
    raise ValueError(f"{column} {text!r} is not a number")


def _microseconds(clock: str) -> int:
    match = _TIME.fullmatch(clock)
    if match is None:
        raise ValueError(f"Time {clock!r} is not written as 23:59:59.000000")
    hours, minutes, seconds, microseconds = map(int, match.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * _SECOND + microseconds


def _clock(microseconds: int) -> str:
    seconds, microseconds = divmod(microseconds, _SECOND)
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{microseconds:06}"
