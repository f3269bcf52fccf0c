"""What a kernel is given whose accesses depend on the values that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]


class Example(NamedTuple):
    """One launch; what it does not give is random."""

    lengths: Integers
    """Of the rows: what a kernel's Length is."""
    sizes: Mapping[str, Integers]
    """Elements of each array that belong to each row."""
    given: Mapping[str, Any]
    """Indices, and other values, of all rows together; numbers of each row, and of the launch."""
    scratch: tuple[str, ...] = ()
    """Arrays whose contents afterwards depend on the number of lanes."""
