r"""Dropout: each element is kept with probability :math:`1-p`, and divided by it, or zeroed.

.. math::
    y_i = x_i \cdot \begin{cases} 1/(1-p) & w_i \ge 2^{32} p \\ 0 & \text{else} \end{cases}

:math:`w_i` is a word of Philox, whose key is the seed and whose counter depends on the element's
position alone: the backward pass draws the same words again. A word serves two elements, the second
with its halves swapped: each gets 32 bits, and the two numbers are almost independent. A work
item draws four words at a time, for elements as far apart as there are lanes, so that loads and
stores are those of whole vectors.

``threshold`` is :math:`2^{32} p`, rounded. Semantics: ``torch.nn.functional.dropout`` of torch
2.13, where zeroing is a product, and so gives NaN for an infinity. Sources: Srivastava et al.,
"Dropout" (JMLR 15, 2014); of the words, :mod:`fusedoptim.kernels.philox`.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    DeviceInt,
    Input,
    Integer,
    Length,
    Output,
    Position,
    Scalar,
    is_word_below,
    lane,
    lanes,
    real,
    swapped_halves,
)
from fusedoptim.kernels.philox import philox

__all__ = ["dropout"]

_WORD = 0xFFFFFFFF


def dropout(
    length: Length,
    position: Position,
    x: Input,
    y: Output,
    seed: DeviceInt,
    threshold: Integer,
    scale: Scalar,
) -> None:
    """A chunk, in blocks of eight elements for each lane; chunks begin where blocks do."""
    pair = 2 * lanes()
    start = 0
    while start + 4 * pair <= length:
        a, b, c, d = words(seed, ((position + start) >> 3) + lane())
        drop_pair(x, y, start, a, threshold, scale)
        drop_pair(x, y, start + pair, b, threshold, scale)
        drop_pair(x, y, start + 2 * pair, c, threshold, scale)
        drop_pair(x, y, start + 3 * pair, d, threshold, scale)
        start += 4 * pair
    if start < length:
        a, b, c, d = words(seed, ((position + start) >> 3) + lane())
        drop_within(length, x, y, start, a, threshold, scale)
        drop_within(length, x, y, start + pair, b, threshold, scale)
        drop_within(length, x, y, start + 2 * pair, c, threshold, scale)
        drop_within(length, x, y, start + 3 * pair, d, threshold, scale)


def words(seed: int, counter: int) -> tuple[int, int, int, int]:
    """The random words of a seed and a counter of 64 bits each."""
    high = (counter >> 32) & _WORD
    return philox(counter & _WORD, high, 0, 0, seed & _WORD, (seed >> 32) & _WORD)


def drop_pair(x: Input, y: Output, start: int, word: int, threshold: int, scale: float) -> None:
    """Drop the two elements of each lane's word."""
    i = start + lane()
    j = start + lanes() + lane()
    y_i = x[i] * factor(word, threshold, scale)
    y_j = x[j] * factor(swapped_halves(word), threshold, scale)
    y[i] = y_i
    y[j] = y_j


def drop_within(
    length: int, x: Input, y: Output, start: int, word: int, threshold: int, scale: float
) -> None:
    """Drop the two elements of a word, as far as they lie within the row."""
    i = start + lane()
    if i < length:
        y[i] = x[i] * factor(word, threshold, scale)
    i += lanes()
    if i < length:
        y[i] = x[i] * factor(swapped_halves(word), threshold, scale)


def factor(word: int, threshold: int, scale: float) -> float:
    """The factor of an element: 0, or ``scale`` if it is kept."""
    return real(0) if is_word_below(word, threshold) else scale
