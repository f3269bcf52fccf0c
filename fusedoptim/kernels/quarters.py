"""The quarters of a long row, which are walked side by side.

A core that reads four places of memory at once waits less than one that reads a single place
(docs/design/launch-shape.md).
"""

from __future__ import annotations

from fusedoptim.kernels.language import lanes

__all__ = ["quarter_of"]

_LEAST = 4096  # elements of a row: a shorter one is read too soon for the order to matter
# Steps by which a quarter is shortened; otherwise all quarters of the longest rows would start at
# the same page offset.
_STAGGER = 4


def quarter_of(length: int) -> int:
    """The elements from one quarter's beginning to the next one's; 0 if a row is walked in order.

    The remainder of the row follows the four quarters. Kernels whose sums must have the same bits
    walk rows in the same order.
    """
    if length < _LEAST:
        return 0
    return max(length // (4 * lanes()) - _STAGGER, 0) * lanes()
