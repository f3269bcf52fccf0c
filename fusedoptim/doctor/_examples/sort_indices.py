"""The indices of bags of three tables, to be sorted."""

from __future__ import annotations

import numpy as np

from fusedoptim.doctor._examples.embedding_bag import BAGS, ONE, PADDING, indices_and_offsets
from fusedoptim.doctor._examples.example import Example, Integers

_PARTS = np.array([1, 2, 3])
"""The number of parts of each table, the last of which is a row of a launch."""
_KEYS = 24
_END = 1 << 62
_SHIFT, _DIGIT_BITS = 33, np.array([3, 2, 3])


def unsorted(random: np.random.Generator) -> Example:
    """The indices of three tables, whose keys have one, three and two digits."""
    indices, offsets = indices_and_offsets(random)
    counts = np.array([len(part) for part in indices])
    passes, digit_bits = np.array([1, 3, 2]), np.array([6, 1, 2])
    counters = passes << digit_bits
    rows = {"keys": counts, "spare": counts, "counters": counters, "bags_of": counts}
    zeros = {name: np.zeros(sizes.sum(), np.int64) for name, sizes in rows.items()}
    return Example(
        BAGS,
        {
            "indices": counts,
            "offsets": BAGS + 1,
            "factors": BAGS,
            "sorted_count": ONE,
            **rows,
        },
        {
            **zeros,
            "indices": np.concatenate(indices),
            "offsets": np.concatenate(offsets),
            "sorted_count": 0 * ONE,
            "bags": BAGS,
            "bags_left": BAGS + 1,
            "count": counts,
            "padding": PADDING,
            "passes": passes,
            "digit_bits": digit_bits,
            "is_weighted": np.array([0, 1, 0]),
            "is_mean": np.array([0, 0, 1]),
        },
    )


def part_of_bags(random: np.random.Generator) -> Example:
    """The first half of a table's indices, all of another's, and the second half of a third's."""
    example = unsorted(random)
    counts = example.given["count"]
    names = ("indices", "offsets", "factors", "keys", "bags_of")
    sizes = {name: example.sizes[name] for name in names}
    digit_bits = example.given["digit_bits"]
    return Example(
        example.lengths,
        {**sizes, "counters": 1 << digit_bits, "part": 2 * ONE},
        {
            **example.given,
            "counters": np.zeros((1 << digit_bits).sum(), np.int64),
            "part": np.zeros(6, np.int64),
            "first": np.array([0, 0, counts[2] // 2]),
            "last": np.array([counts[0] // 2, _END, _END]),
        },
    )


def _keys(random: np.random.Generator) -> list[Integers]:
    return [random.integers(0, 64, _KEYS) << 32 | random.integers(0, 9, _KEYS) for _ in _PARTS]


def part_of_keys(random: np.random.Generator) -> Example:
    """The last part of each of three tables' keys; one table has fewer keys than room."""
    return Example(
        _KEYS // _PARTS,
        {
            "keys": _KEYS * ONE,
            "counters": 1 << _DIGIT_BITS,
            "part": 2 * ONE,
            "sorted_count": ONE,
        },
        {
            "keys": np.concatenate(_keys(random)),
            "counters": np.zeros((1 << _DIGIT_BITS).sum(), np.int64),
            "part": np.zeros(6, np.int64),
            "sorted_count": np.array([_KEYS, _KEYS - 1, _KEYS]),
            "first": _KEYS - _KEYS // _PARTS,
            "last": _END * ONE,
            "shift": _SHIFT * ONE,
            "digit_bits": _DIGIT_BITS,
        },
    )


def counted(random: np.random.Generator) -> Example:
    """The last part of each of three tables' keys, and the counted digits of all parts."""
    tables = _keys(random)
    counters = [
        np.bincount(part >> _SHIFT & (1 << bits) - 1, minlength=1 << bits)
        for keys, parts, bits in zip(tables, _PARTS, _DIGIT_BITS)
        for part in np.split(keys, parts)
    ]
    last = _KEYS - _KEYS // _PARTS
    return Example(
        _KEYS // _PARTS,
        {
            "keys": _KEYS * ONE,
            "spare": _KEYS * ONE,
            "counters_of_all": _PARTS << _DIGIT_BITS,
            "places": 1 << _DIGIT_BITS,
            "part": 2 * ONE,
            "sorted_count": ONE,
        },
        {
            "keys": np.concatenate(tables),
            "spare": np.zeros(3 * _KEYS, np.int64),
            "counters_of_all": np.concatenate(counters),
            "places": np.zeros((1 << _DIGIT_BITS).sum(), np.int64),
            "part": np.stack([last, _KEYS * ONE], 1).ravel(),
            "sorted_count": 0 * ONE,
            "parts": _PARTS,
            "parts_before": _PARTS - 1,
            "shift": _SHIFT * ONE,
            "digit_bits": _DIGIT_BITS,
        },
    )
