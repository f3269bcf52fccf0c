"""A pool's memory over time."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from allocator.monitoring.hooks import Hook
from allocator.pool.allocation import Allocation
from allocator.pool.core import Core
from allocator.pool.sizes import as_integer
from allocator.runtime.formatting import escaped, size_text

_WIDTH, _HEIGHT = 640, 160
_COLOURS = {"reserved": "#999999", "allocated": "#1f77b4"}


class Row(NamedTuple):
    """The pool's memory at one moment."""

    seconds: float
    """time since the timeline began."""
    allocated: int
    """bytes of blocks in use."""
    reserved: int
    """bytes taken from the driver."""


class Timeline(Hook):
    """A pool's memory after each change, in the block of ``with pool.timeline()``.

    Released memory counts as in use until the pool's next call takes it back.

    Made by :meth:`Pool.timeline`.

    Example:
        >>> from allocator import Pool
        >>> pool = Pool("cpu")
        >>> with pool.timeline() as timeline:
        ...     x = pool.empty(1000)
        ...     del x
        >>> max(row.allocated for row in timeline.rows())
        4096
    """

    def __init__(self, core: Core, max_entries: int) -> None:
        max_entries = as_integer(max_entries, "max_entries")
        if max_entries < 1:
            raise ValueError(f"max_entries={max_entries} is less than 1")
        self._core = core
        self._rows: deque[Row] = deque(maxlen=max_entries)
        self._levels = core.update().levels
        self._began = 0.0

    def __enter__(self) -> Timeline:
        self._rows.clear()
        self._began = time.perf_counter()
        self._core.update()  # takes in what was released before
        self._add()
        try:
            self._core.add_hook(self)
        except BaseException:
            self._core.remove_hook(self)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._core.update()  # takes in what was released in the block
        finally:
            self._core.remove_hook(self)
        self._add()

    def allocated(self, pool: Any, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        self._add()

    def released(self, pool: Any, allocation: Allocation) -> None:
        """See :class:`Hook`."""
        self._add(-allocation.size)  # the pool counts it as in use until its hooks return

    def grown(self, pool: Any, address: int, nbytes: int) -> None:
        """See :class:`Hook`."""
        self._add()

    def shrunk(self, pool: Any, address: int, nbytes: int) -> None:
        """See :class:`Hook`."""
        self._add()

    def rows(self) -> list[Row]:
        """The recorded moments, oldest first."""
        return list(self._rows)

    def plot(self, ax: Any = None) -> Any:
        """Draw both curves with matplotlib.

        Args:
            ax: matplotlib axes to draw on; new ones if None.

        Returns:
            the axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError(
                    "plot() needs matplotlib: pip install matplotlib; rows() gives the numbers"
                ) from error
            _, ax = pyplot.subplots()
        rows = self.rows()
        seconds = [row.seconds for row in rows]
        for name, colour in _COLOURS.items():
            values = [getattr(row, name) / (1 << 20) for row in rows]
            ax.step(seconds, values, where="post", label=name, color=colour)
        ax.set(xlabel="seconds", ylabel="MiB", title=self._core.name)
        ax.legend()
        return ax

    def _repr_html_(self) -> str:
        """Both curves for Jupyter, without matplotlib."""
        rows = self.rows()
        top = max((row.reserved for row in rows), default=0) or 1
        last = max((row.seconds for row in rows), default=0.0) or 1.0
        curves = "".join(
            f'<path d="{_steps(rows, name, last, top)}" fill="none" stroke="{colour}"/>'
            for name, colour in _COLOURS.items()
        )
        peak = max((row.allocated for row in rows), default=0)
        return (
            f"<div><b>{escaped(self._core.name)}</b>: at most {size_text(peak)} allocated, "
            f"{size_text(top if rows else 0)} reserved, in {last:.3g} s"
            f'<svg viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}" width="{_WIDTH}" '
            f'style="display:block">{curves}</svg></div>'
        )

    def _add(self, change: int = 0) -> None:
        levels = self._levels
        allocated = levels["allocated_bytes"][0].current + change
        reserved = levels["reserved_bytes"][0].current
        self._rows.append(Row(time.perf_counter() - self._began, allocated, reserved))


def _steps(rows: list[Row], name: str, last: float, top: int) -> str:
    """An SVG path with the minimum and maximum in each column of pixels, so no peak is lost."""
    columns: dict[int, list[int]] = {}
    for row in rows:
        columns.setdefault(round(row.seconds / last * _WIDTH), []).append(getattr(row, name))
    points = []
    for x, values in columns.items():
        heights = [_HEIGHT * (1 - value / top) for value in (min(values), max(values), values[-1])]
        points.append(f"H{x}" + "".join(f"V{height:.1f}" for height in heights))
    return f"M0 {_HEIGHT}" + "".join(points)
