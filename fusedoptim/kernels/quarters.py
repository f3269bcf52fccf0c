"""The quarters of a long row, which are walked side by side.

A core that reads four places of memory at once waits less than one that reads a single place
(docs/design/launch-shape.md).
"""

from __future__ import annotations

from fusedoptim.kernels.language import lanes

__all__ = ["quarter_of"]

_LEAST = 4096  # elements of a row: a shorter one is read too soon for the order to matter
# Steps that a quarter is shorter: in the longest rows all would begin at the same place of a page.
_STAGGER = 4


def quarter_of(length: int) -> int:
    """The elements from one quarter's beginning to the next one's; 0 if a row is walked in order.

    What is left of the row follows the four quarters. Kernels whose sums must have the same bits
    walk rows in the same order.
    """
    if length < _LEAST:
        return 0
    return max(length // (4 * lanes()) - _STAGGER, 0) * lanes()
