"""A place for every allocation of a trace in one piece of memory, decided beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from allocator.pool.store import ROUNDING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from allocator.watching.trace import Trace

    Integers = NDArray[np.int64]

_MOST_BYTES = 2**62
_GOOD = 1.01


class Plan(NamedTuple):
    """Where each allocation of a trace lies in one piece of memory.

    Example:
        >>> import allocator
        >>> pool = allocator.Pool("cpu")
        >>> with pool.record() as trace:
        ...     x, y = pool.array(100), pool.array(50)
        >>> plan = allocator.advise(trace).plan
        >>> memory = pool.allocate(plan.peak)
        >>> x = memory.array(100, "float32", offset=plan.offsets[0])
        >>> y = memory.array(50, "float32", offset=plan.offsets[1])
        >>> memory.nbytes, abs(y.address - x.address)
        (1024, 512)
    """

    offsets: tuple[int, ...]
    """Bytes from the start to each allocation, in the order of the trace."""
    peak: int
    """Bytes of the piece."""
    lower_bound: int
    """Bytes that any plan needs: the most in use at once, in multiples of 512."""


class _Lifetimes(NamedTuple):
    """Of allocations, in the order of the trace."""

    begins: Integers
    """The index of the event."""
    ends: Integers
    """That of the release, or of the trace's end."""
    sizes: Integers
    """Bytes, in multiples of 512."""

    def of(self, indices: Any) -> _Lifetimes:
        """Some of them."""
        return _Lifetimes(*(column[indices] for column in self))


def planned(trace: Trace) -> Plan:
    """A plan for a trace.

    Allocations whose lifetimes overlap must not overlap in memory. As the best plan is hard to
    find, each gets the lowest place that is free in its lifetime, the largest allocation first.
    Where that takes 1% more than any plan must, what has the largest product of bytes and lifetime
    is placed first in another, and the smaller is kept. Streams share no memory, for they run side
    by side.

    The time is of the order n² + n k log k for n allocations, of which k are in use during the
    lifetime of one; the square is of comparisons of numpy's.

    Raises:
        ValueError: the sizes add up to more than 2^62 bytes.
    """
    import numpy as np

    lifetimes, streams = _lifetimes(trace)
    offsets = np.zeros_like(streams)
    peak = lower_bound = 0
    for stream in np.unique(streams):
        indices = np.flatnonzero((streams == stream) & (lifetimes.sizes > 0))
        of_stream = lifetimes.of(indices)
        packed = _packed(of_stream)
        offsets[indices] = peak + packed
        lower_bound += _most_at_once(of_stream)
        peak += int(np.max(packed + of_stream.sizes, initial=0))
    return Plan(tuple(offsets.tolist()), peak, lower_bound)


def _lifetimes(trace: Trace) -> tuple[_Lifetimes, Integers]:
    """Of a trace's allocations, and their streams."""
    import numpy as np

    begins: list[int] = []
    ends: list[int] = []
    sizes: list[int] = []
    streams: list[int] = []
    live: dict[int, int] = {}
    for index, event in enumerate(trace):
        if event.action == "allocate":
            live[event.pointer] = len(begins)
            begins.append(index)
            ends.append(len(trace))
            sizes.append(-(-event.size // ROUNDING) * ROUNDING)
            streams.append(event.stream)
        elif event.action == "free" and event.size:
            ends[live[event.pointer]] = index
    if sum(sizes) > _MOST_BYTES:
        raise ValueError(f"the allocations add up to {sum(sizes)} bytes, more than 2^62")
    # Streams may be addresses, as of a file: number them.
    numbers = {stream: number for number, stream in enumerate(dict.fromkeys(streams))}
    columns = (np.array(column, np.int64) for column in (begins, ends, sizes))
    return _Lifetimes(*columns), np.array([numbers[stream] for stream in streams], np.int64)


def _most_at_once(lifetimes: _Lifetimes) -> int:
    """The most bytes in use at the same time."""
    import numpy as np

    begins, ends, sizes = lifetimes
    changes = np.concatenate((sizes, -sizes))
    order = np.argsort(np.concatenate((begins, ends)), kind="stable")
    return int(np.max(np.cumsum(changes[order]), initial=0))


def _packed(lifetimes: _Lifetimes) -> Integers:
    """Offsets of allocations, of the better of the two orders."""
    import numpy as np

    begins, ends, sizes = lifetimes
    largest_first = np.lexsort((begins, -sizes))
    most_first = np.lexsort((begins, -sizes.astype(float) * (ends - begins)))
    offsets, peak = _placed(lifetimes, largest_first)
    if peak > _GOOD * _most_at_once(lifetimes):
        others, other_peak = _placed(lifetimes, most_first)
        if other_peak < peak:
            return others
    return offsets


def _placed(lifetimes: _Lifetimes, order: Integers) -> tuple[Integers, int]:
    """Offsets of allocations that are placed in this order, and the end of the last."""
    import numpy as np

    # In the order in which they are placed, so that those placed before are a slice.
    begins, ends, sizes = lifetimes.of(order)
    starts = np.zeros_like(sizes)
    for n, (begin, end, size) in enumerate(zip(begins.tolist(), ends.tolist(), sizes.tolist())):
        beside = np.flatnonzero((begins[:n] < end) & (ends[:n] > begin))
        starts[n] = _lowest_gap(starts[beside], sizes[beside], size)
    offsets = np.empty_like(starts)
    offsets[order] = starts
    return offsets, int(np.max(starts + sizes, initial=0))


def _lowest_gap(starts: Integers, sizes: Integers, size: int) -> int:
    """Where so many bytes fit beside blocks."""
    import numpy as np

    order = np.argsort(starts)
    starts = starts[order]
    # A gap lies between all blocks that begin before and the next one.
    gaps = np.concatenate(([0], np.maximum.accumulate(starts + sizes[order])))
    fits = np.flatnonzero(starts - gaps[:-1] >= size)
    return int(gaps[fits[0] if fits.size else -1])
