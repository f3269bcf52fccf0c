"""The arguments of a kernel whose memory accesses depend on the values that it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Integers = np.ndarray[Any, np.dtype[np.int64]]


class Example(NamedTuple):
    """The arguments of one launch; those that it does not give are random."""

    lengths: Integers
    """The length of each row, which the kernel's Length argument gets."""
    sizes: Mapping[str, Integers]
    """Elements of each array that belong to each row."""
    given: Mapping[str, Any]
    """Arrays of indices and other values, of all rows together; numbers of each row; numbers of the
    launch."""
    scratch: tuple[str, ...] = ()
    """Arrays whose contents afterwards depend on the number of lanes."""
