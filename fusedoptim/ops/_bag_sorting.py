"""Sorts the indices of embedding bags: a work item for each table, or several for a large one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fusedoptim.launch.block import Indices, as_int64
from fusedoptim.ops._launching import VARIANT_OF, TableLaunch, launch_table

_WORK = 64
"""Sorting an index takes about as long as adding this many elements."""
_LEAST_DIGIT_BITS, _MOST_DIGIT_BITS = 3, 11
"""The least and most bits of a digit of the radix sort. Its counters fill a cache line, as
concurrent work items must not share one, and stay in the first-level cache."""
_MOST_BITS = [min(max(bits - 1, 4), _MOST_DIGIT_BITS) for bits in range(65)]
"""The most bits of a digit, by the bit length of the number of indices."""
_MOST_KEPT = 256
"""Choices of digits that are remembered."""
LINE = 64 // 8
"""Integers of a cache line: work items that write concurrently must not share one."""
_LAUNCHES = 96 * 1024
"""Launches of parts take about as long as sorting this many indices."""
_END = 1 << 62
"""More than the number of indices."""
_OF_BAGS = ("indices", "offsets", "bags", "bags_left", "count", "factors", "bags_of")
_OF_PART = ("length", "first", "last", "part", "counters", "keys", "digit_bits")
_COLUMNS = {
    "write_keys": (*_OF_BAGS, *_OF_PART, "padding", "is_weighted", "is_mean"),
    "count_keys": (*_OF_PART, "sorted_count", "shift"),
    "move_keys": (
        *("length", "part", "parts", "parts_before", "counters_of_all", "places"),
        *("keys", "spare", "sorted_count", "digit_bits", "shift"),
    ),
}
"""The arguments of the kernels that sort in parts."""


class Digits:
    """The digits of each table's keys: few counters for few indices."""

    def __init__(self, most: tuple[int, ...], table_rows: tuple[int, ...]) -> None:
        """Choose digits of at most ``most`` bits, for each table."""
        bits = np.array([max(rows - 1, 1).bit_length() for rows in table_rows])
        self.passes = -(-bits // most)
        """Digits of a key."""
        self.bits = np.maximum(-(-bits // self.passes), _LEAST_DIGIT_BITS)
        """Bits of a digit."""
        self.are_moved_back = self.passes % 2 == 0
        """Whether the sorted keys are where they were written."""
        counters = self.passes << self.bits
        self.counters, self.first_counter = int(counters.sum()), _before(counters)


_digits_of = functools.lru_cache(_MOST_KEPT)(Digits)


def digits_of(sizes: Sequence[int], table_rows: tuple[int, ...]) -> Digits:
    """The digits for ``sizes`` indices of each table."""
    return _digits_of(tuple([_MOST_BITS[size.bit_length()] for size in sizes]), table_rows)


def work_of(size: int, tables: int) -> int:
    """The approximate work of sorting one of ``tables`` tables with ``size`` indices in all.

    It is a power of two, so that batches of about the same size have the same work.
    """
    return 1 << (size * _WORK // tables).bit_length()


class Sorting:
    """The sort of the indices of tables."""

    def __init__(self, device: torch.device, real: torch.dtype, tables: Mapping[str, Any]) -> None:
        """Prepare sorts.

        Args:
            device: the device of all memory.
            real: the dtype of factors.
            tables: the kernel's arguments that are the same in all sorts, for each table or all.
        """
        self._device, self._variant, self._tables = device, VARIANT_OF[real], tables
        self._launch = TableLaunch("sort_indices", device, self._variant, tables)

    def run(
        self, sizes: Indices, digits: Digits, parts: Indices | None, tables: Mapping[str, Any]
    ) -> None:
        """Sort.

        Args:
            sizes: indices of each table.
            digits: the digits of each table's keys.
            parts: the number of parts of each table that work items sort; None if it is 1 for all.
            tables: the other arguments of the kernel, except the room for counters.
        """
        tables = {**tables, "passes": digits.passes, "digit_bits": digits.bits}
        if parts is not None:
            tables = {**self._tables, **tables}
            _sort_in_parts(self._device, self._variant, sizes, parts, tables)
            return
        room = torch.empty(digits.counters, dtype=torch.int64, device=self._device)
        counters = as_int64([room.data_ptr()]) + digits.first_counter
        self._launch.run({**tables, "counters": counters}, {})


def _before(sizes: Indices) -> Indices:
    """Bytes before each of several rooms for ``sizes`` integers."""
    before: Indices = 8 * (np.cumsum(sizes) - sizes)
    return before


def parts_of(sizes: Indices, threads: int) -> Indices:
    """The number of parts of each table that work items sort; 1 for all if that is quicker."""
    total = int(sizes.sum())
    # An index in a part is read once more for each digit.
    if int(sizes.max(initial=0)) < _LAUNCHES + 5 * total // (4 * threads):
        return np.ones(len(sizes), np.int64)
    return np.maximum(-(-sizes * threads // total), 1)


def _rooms(sizes: Indices, device: torch.device) -> tuple[Indices, torch.Tensor]:
    """The addresses of rooms for ``sizes`` integers, and their memory."""
    memory = torch.empty(int(sizes.sum()), dtype=torch.int64, device=device)
    return as_int64([memory.data_ptr()]) + _before(sizes), memory


def _sort_in_parts(
    device: torch.device,
    variant: str,
    sizes: Indices,
    parts: Indices,
    tables: Mapping[str, Any],
) -> None:
    """Sort with work items that each count the digits of a part, and move it a launch later."""
    of = np.repeat(np.arange(len(sizes)), parts)
    before = np.arange(len(of)) - (np.cumsum(parts) - parts)[of]
    first, last = sizes[of] * before // parts[of], sizes[of] * (before + 1) // parts[of]
    columns = {name: np.broadcast_to(values, sizes.shape)[of] for name, values in tables.items()}
    digits = 1 << columns["digit_bits"]
    counters, _counters = _rooms(digits, device)
    places, _places = _rooms(digits, device)
    bounds, _bounds = _rooms(np.full(len(of), LINE), device)
    columns |= {
        "length": (last - first) * _WORK + 1,
        "first": first,
        "last": np.where(before + 1 == parts[of], _END, last),
        "counters": counters,
        "counters_of_all": counters - 8 * digits * before,
        "places": places,
        "part": bounds,
        "parts": parts[of],
        "parts_before": before,
    }
    for digit in range(int(tables["passes"].max())):
        has_digit = columns["passes"] > digit
        columns["shift"] = 32 + digit * columns["digit_bits"]
        for name in ("count_keys" if digit else "write_keys", "move_keys"):
            own = {column: columns[column][has_digit] for column in _COLUMNS[name]}
            launch_table(name, device, variant, own, {})
        columns["keys"], columns["spare"] = columns["spare"], columns["keys"]
