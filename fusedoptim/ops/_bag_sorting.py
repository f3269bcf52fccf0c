"""Sorts the indices of embedding bags: a work item for each table, or several for a large one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fusedoptim.launch.block import Indices, as_int64
from fusedoptim.ops._launching import VARIANT_OF, TableLaunch, launch_table

_WORK = 64
"""Sorting an index takes about as long as adding so many elements."""
_LEAST_DIGIT_BITS, _MOST_DIGIT_BITS = 3, 11
"""Of the radix sort. Its counters fill a cache line, as work items that run at once share none, and
stay in the first-level cache."""
LINE = 64 // 8
"""Integers of a cache line: what work items write at once shares none."""
_LAUNCHES = 96 * 1024
"""Launches of parts take about as long as to sort so many indices."""
_END = 1 << 62
"""More than all indices."""
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


def digits_of(sizes: Indices, table_rows: Indices) -> tuple[Indices, Indices]:
    """Bits of a digit and number of digits, for each table: few counters for few indices."""
    most = np.clip(np.log2(np.maximum(sizes, 1)).astype(np.int64), 4, _MOST_DIGIT_BITS)
    bits = np.array([int(rows - 1).bit_length() for rows in np.maximum(table_rows, 2)])
    passes = -(-bits // most)
    return np.maximum(-(-bits // passes), _LEAST_DIGIT_BITS), passes


class Sorting:
    """The sort of the indices of tables, of so many each."""

    def __init__(
        self,
        device: torch.device,
        real: torch.dtype,
        sizes: Indices,
        table_rows: Indices,
        threads: int,
        tables: Mapping[str, Any],
    ) -> None:
        """Prepare the sort.

        Args:
            device: of all memory.
            real: the dtype of factors.
            sizes: indices of each table.
            table_rows: rows of each table.
            threads: those that may sort a table together.
            tables: the arguments of the kernel, of each table or of all, but for what is above,
                addresses and the room for counters.
        """
        digit_bits, self.passes = digits_of(sizes, table_rows)
        """Digits of each table's keys."""
        self._tables = {
            **tables,
            "length": sizes * _WORK + 1,
            "passes": self.passes,
            "digit_bits": digit_bits,
        }
        self._device, self._variant, self._sizes = device, VARIANT_OF[real], sizes
        self._parts = _parts_of(sizes, threads)
        self._is_cut = bool(self._parts.max(initial=1) > 1)
        counters = self.passes << digit_bits
        self._counters, self._first_counter = int(counters.sum()), _before(counters)
        self._launch = TableLaunch("sort_indices", device, self._variant, self._tables)

    def run(self, addresses: Mapping[str, Any]) -> None:
        """Sort what is at these addresses of each table."""
        if self._is_cut:
            tables = {**self._tables, **addresses}
            _sort_in_parts(self._device, self._variant, self._sizes, self._parts, tables)
            return
        room = torch.empty(self._counters, dtype=torch.int64, device=self._device)
        counters = as_int64([room.data_ptr()]) + self._first_counter
        self._launch.run({**addresses, "counters": counters}, {})


def _before(sizes: Indices) -> Indices:
    """Bytes before each of some rooms of so many integers."""
    before: Indices = 8 * (np.cumsum(sizes) - sizes)
    return before


def _parts_of(sizes: Indices, threads: int) -> Indices:
    """The parts of each table that work items sort; one of each where that is quicker."""
    total = int(sizes.sum())
    # An index in a part is read once more for each digit.
    if int(sizes.max(initial=0)) < _LAUNCHES + 5 * total // (4 * threads):
        return np.ones(len(sizes), np.int64)
    return np.maximum(-(-sizes * threads // total), 1)


def _rooms(sizes: Indices, device: torch.device) -> tuple[Indices, torch.Tensor]:
    """The addresses of so many integers each, and their memory."""
    memory = torch.empty(int(sizes.sum()), dtype=torch.int64, device=device)
    return as_int64([memory.data_ptr()]) + _before(sizes), memory


def _sort_in_parts(
    device: torch.device,
    variant: str,
    sizes: Indices,
    parts: Indices,
    tables: Mapping[str, Any],
) -> None:
    """Sort by work items that each count the digits of a part, and move it in a launch later."""
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
