r"""Dropout: each element is kept with probability :math:`1-p`, and divided by it, or zeroed.

.. math::
    y_i = x_i \cdot \begin{cases} 1/(1-p) & w_i \ge 2^{32} p \\ 0 & \text{else} \end{cases}

:math:`w_i` is a word of Philox, whose key is the seed and whose counter depends on the element's
position alone: the backward pass draws the same words again. A work item draws four at a time, for
elements as far apart as there are lanes, so that loads and stores are those of whole vectors.

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
    lane,
    lanes,
    real,
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
    """A chunk, in blocks of four elements for each lane; chunks begin where blocks do."""
    block = 4 * lanes()
    start = 0
    while start + block <= length:
        a, b, c, d = words(seed, ((position + start) >> 2) + lane())
        i = start + lane()
        j = i + lanes()
        k = j + lanes()
        m = k + lanes()
        y_i = x[i] * factor(a, threshold, scale)
        y_j = x[j] * factor(b, threshold, scale)
        y_k = x[k] * factor(c, threshold, scale)
        y_m = x[m] * factor(d, threshold, scale)
        y[i] = y_i
        y[j] = y_j
        y[k] = y_k
        y[m] = y_m
        start += block
    if start < length:
        a, b, c, d = words(seed, ((position + start) >> 2) + lane())
        i = start + lane()
        if i < length:
            y[i] = x[i] * factor(a, threshold, scale)
        i += lanes()
        if i < length:
            y[i] = x[i] * factor(b, threshold, scale)
        i += lanes()
        if i < length:
            y[i] = x[i] * factor(c, threshold, scale)
        i += lanes()
        if i < length:
            y[i] = x[i] * factor(d, threshold, scale)


def words(seed: int, counter: int) -> tuple[int, int, int, int]:
    """The random words of a seed and a counter of 64 bits each."""
    high = (counter >> 32) & _WORD
    return philox(counter & _WORD, high, 0, 0, seed & _WORD, (seed >> 32) & _WORD)


def factor(word: int, threshold: int, scale: float) -> float:
    """What to multiply an element by."""
    return scale if word >= threshold else real(0)
