r"""Embedding bags: the sum of the rows of a table that each bag names.

.. math::
    y_b = \sum_{k = o_b}^{o_{b+1} - 1} w_{i_k}

:math:`i` are ``indices``, :math:`o` ``offsets``. A launch's row is a run of bags of one table, of
``width`` columns; bags lie ``stride`` elements apart in the output.

Semantics: ``torch.nn.functional.embedding_bag`` of torch 2.13.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    Indices,
    Input,
    Length,
    Output,
    RowInteger,
    lane,
    lanes,
    real,
)

__all__ = ["embedding_bag"]


def embedding_bag(
    length: Length,
    table: Input,
    indices: Indices,
    offsets: Indices,
    output: Output,
    width: RowInteger,
    stride: RowInteger,
) -> None:
    """The sums of ``length`` bags."""
    bag = 0
    while bag < length:
        column = lane()
        while column < width:
            total = real(0)
            k = offsets[bag]
            while k < offsets[bag + 1]:
                total += table[indices[k] * width + column]
                k += 1
            output[bag * stride + column] = total
            column += lanes()
        bag += 1
