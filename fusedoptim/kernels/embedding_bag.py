r"""Embedding bags: sums or means of the rows of a table that each bag names.

.. math::
    y_b = f_b \sum_{k = o_b}^{o_{b+1} - 1} v_k\,w_{i_k}

:math:`i` are ``indices``, :math:`o` ``offsets``, :math:`v` ``weights`` (1 without), and :math:`f_b`
is 1 for a sum and one over the number of terms for a mean. Indices equal to ``padding`` have no
term. A launch's row is a run of bags of one table, of ``width`` columns; bags lie ``stride``
elements apart in the output. :mod:`fusedoptim.kernels.embedding_bag_backward` is the other way.

Semantics: ``torch.nn.functional.embedding_bag`` of torch 2.13.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    Indices,
    Input,
    Output,
    RowFlag,
    RowInteger,
    Values,
    fma,
    lane,
    lanes,
    real,
)

__all__ = ["embedding_bag"]


def embedding_bag(
    table: Input,
    indices: Indices,
    offsets: Indices,
    weights: Values,
    output: Output,
    faults: Indices,
    bags: RowInteger,
    bags_left: RowInteger,
    count: RowInteger,
    table_rows: RowInteger,
    width: RowInteger,
    stride: RowInteger,
    padding: RowInteger,
    is_weighted: RowFlag,
    is_mean: RowFlag,
) -> None:
    """The first ``bags`` of the ``bags_left`` that ``offsets`` has; the last one ends at ``count``.

    A bag that names no row of the table, or ends before it begins, is not read: it sets the first
    of ``faults``.
    """
    bag = 0
    while bag < bags:
        begin = offsets[bag]
        end = count
        if bag + 1 < bags_left:
            end = offsets[bag + 1]
        if is_wrong(indices, begin, end, count, table_rows):
            faults[0] = 1
            end = begin
        factor = real(1)
        if is_mean:
            terms = real(0)
            k = begin
            while k < end:
                if indices[k] != padding:
                    terms += real(1)
                k += 1
            if terms > real(0):
                factor = real(1) / terms
        start = bag * stride + lane()
        column = 0
        while column + 4 * lanes() <= width:
            total0 = total1 = total2 = total3 = real(0)
            k = begin
            while k < end:
                i = indices[k]
                if i != padding:
                    weight = weights[k] if is_weighted else real(1)
                    place = i * width + column + lane()
                    total0 = fma(weight, table[place], total0)
                    total1 = fma(weight, table[place + lanes()], total1)
                    total2 = fma(weight, table[place + 2 * lanes()], total2)
                    total3 = fma(weight, table[place + 3 * lanes()], total3)
                k += 1
            place = start + column
            output[place] = total0 * factor
            output[place + lanes()] = total1 * factor
            output[place + 2 * lanes()] = total2 * factor
            output[place + 3 * lanes()] = total3 * factor
            column += 4 * lanes()
        while column < width:
            if column + lane() < width:
                total = real(0)
                k = begin
                while k < end:
                    i = indices[k]
                    if i != padding:
                        weight = weights[k] if is_weighted else real(1)
                        total = fma(weight, table[i * width + column + lane()], total)
                    k += 1
                output[start + column] = total * factor
            column += lanes()
        bag += 1


def is_wrong(indices: Indices, begin: int, end: int, count: int, table_rows: int) -> bool:
    """Whether a bag has an index of no row, or is none: a sign is left of any negative number."""
    signs = begin | (end - begin) | (count - end)
    if signs >= 0:
        k = begin
        while k < end:
            signs |= indices[k] | (table_rows - 1 - indices[k])
            k += 1
    return signs < 0
