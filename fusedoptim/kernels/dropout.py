r"""Dropout: each element is kept with probability :math:`1-p`, and divided by it, or zeroed.

.. math::
    y_i = x_i \cdot \begin{cases} 1/(1-p) & w_i \ge 2^{32} p \\ 0 & \text{else} \end{cases}

AlphaDropout has another factor, and adds a constant to what is kept and another to what is dropped.

:math:`w_i` is a word of Philox, whose key is the seed and whose counter depends on the element's
position alone: the backward pass draws the same words again. A word serves two elements, the second
with its halves swapped: each gets 32 bits, and the two numbers are almost independent. A work
item draws four words at a time, for elements as far apart as there are lanes, so that loads and
stores are those of whole vectors.

``threshold`` is :math:`2^{32} p`, rounded. Semantics: ``dropout`` and ``alpha_dropout`` of
``torch.nn.functional`` of torch 2.13, where zeroing is a product, and so gives NaN for an infinity.
Sources: Srivastava et al., "Dropout" (JMLR 15, 2014); Klambauer et al., "Self-Normalizing Neural
Networks" (NeurIPS 2017); of the words, :mod:`fusedoptim.kernels.philox`.
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

__all__ = ["alpha_dropout", "dropout"]

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
    """A chunk of dropout. The compiler omits the sums, as adding -0 changes nothing."""
    drop(length, position, x, y, seed, threshold, scale, real(-0.0), real(-0.0))


def alpha_dropout(
    length: Length,
    position: Position,
    x: Input,
    y: Output,
    seed: DeviceInt,
    threshold: Integer,
    scale: Scalar,
    kept: Scalar,
    dropped: Scalar,
) -> None:
    """A chunk of AlphaDropout: ``kept`` or ``dropped`` is added to the product."""
    drop(length, position, x, y, seed, threshold, scale, kept, dropped)


def drop(
    length: int,
    position: int,
    x: Input,
    y: Output,
    seed: int,
    threshold: int,
    scale: float,
    kept: float,
    dropped: float,
) -> None:
    """A chunk, in blocks of eight elements for each lane; chunks begin where blocks do."""
    pair = 2 * lanes()
    start = 0
    while start + 4 * pair <= length:
        a, b, c, d = words(seed, ((position + start) >> 3) + lane())
        drop_pair(x, y, start, a, threshold, scale, kept, dropped)
        drop_pair(x, y, start + pair, b, threshold, scale, kept, dropped)
        drop_pair(x, y, start + 2 * pair, c, threshold, scale, kept, dropped)
        drop_pair(x, y, start + 3 * pair, d, threshold, scale, kept, dropped)
        start += 4 * pair
    if start < length:
        a, b, c, d = words(seed, ((position + start) >> 3) + lane())
        drop_within(length, x, y, start, a, threshold, scale, kept, dropped)
        drop_within(length, x, y, start + pair, b, threshold, scale, kept, dropped)
        drop_within(length, x, y, start + 2 * pair, c, threshold, scale, kept, dropped)
        drop_within(length, x, y, start + 3 * pair, d, threshold, scale, kept, dropped)


def words(seed: int, counter: int) -> tuple[int, int, int, int]:
    """The random words of a seed and a counter of 64 bits each."""
    high = (counter >> 32) & _WORD
    return philox(counter & _WORD, high, 0, 0, seed & _WORD, (seed >> 32) & _WORD)


def drop_pair(
    x: Input,
    y: Output,
    start: int,
    word: int,
    threshold: int,
    scale: float,
    kept: float,
    dropped: float,
) -> None:
    """Drop the two elements of each lane's word."""
    i = start + lane()
    j = start + lanes() + lane()
    y_i = result(x[i], word, threshold, scale, kept, dropped)
    y_j = result(x[j], swapped_halves(word), threshold, scale, kept, dropped)
    y[i] = y_i
    y[j] = y_j


def drop_within(
    length: int,
    x: Input,
    y: Output,
    start: int,
    word: int,
    threshold: int,
    scale: float,
    kept: float,
    dropped: float,
) -> None:
    """Drop the two elements of a word, as far as they lie within the row."""
    i = start + lane()
    if i < length:
        y[i] = result(x[i], word, threshold, scale, kept, dropped)
    i += lanes()
    if i < length:
        y[i] = result(x[i], swapped_halves(word), threshold, scale, kept, dropped)


def result(x: float, word: int, threshold: int, scale: float, kept: float, dropped: float) -> float:
    """The result for an element."""
    is_dropped = is_word_below(word, threshold)
    factor = real(0) if is_dropped else scale
    return x * factor + (dropped if is_dropped else kept)
