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
    rounds,
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
    is_first: RowFlag,
    is_weighted: RowFlag,
    is_mean: RowFlag,
) -> None:
    """The first ``bags`` of the ``bags_left`` that ``offsets`` has; the last one ends at ``count``.

    If one of them names no row of the table, or ends before it begins, or if the first of all,
    which a row with ``is_first`` has, does not begin at 0, all are zero, and the first of
    ``faults`` is set. Plain sums have a loop of their own: the fewer instructions to a row, the
    more rows a core fetches at once. So a bag of one index is a copy there, if sums are rounded.
    """
    if has_fault(indices, offsets, bags, bags_left, count, table_rows, is_first):
        faults[0] = 1
        count = 0
        bags_left = 0
    is_plain = padding < 0 and not is_weighted and not is_mean and bags_left > 0
    bag = 0
    if is_plain and width % (4 * lanes()) == 0:
        stop = offsets[0]
        while bag < bags:
            begin = stop
            stop = count
            if bag + 1 < bags_left:
                stop = offsets[bag + 1]
            column = 0
            while column < width:
                if rounds(output) and stop - begin == 1:
                    source = indices[begin] * width + column + lane()
                    target = bag * stride + column + lane()
                    output[target] = table[source]
                    output[target + lanes()] = table[source + lanes()]
                    output[target + 2 * lanes()] = table[source + 2 * lanes()]
                    output[target + 3 * lanes()] = table[source + 3 * lanes()]
                else:
                    total0 = total1 = total2 = total3 = real(0)
                    k = begin
                    while k < stop:
                        place = indices[k] * width + column + lane()
                        total0 += table[place]
                        total1 += table[place + lanes()]
                        total2 += table[place + 2 * lanes()]
                        total3 += table[place + 3 * lanes()]
                        k += 1
                    place = bag * stride + column + lane()
                    output[place] = total0
                    output[place + lanes()] = total1
                    output[place + 2 * lanes()] = total2
                    output[place + 3 * lanes()] = total3
                column += 4 * lanes()
            bag += 1
    while bag < bags:
        begin = count
        stop = count
        if bags_left > 0:
            begin = offsets[bag]
        if bag + 1 < bags_left:
            stop = offsets[bag + 1]
        factor = real(1)
        if is_mean:
            terms = real(0)
            k = begin
            while k < stop:
                if indices[k] != padding:
                    terms += real(1)
                k += 1
            if terms > real(0):
                factor = real(1) / terms
        column = 0
        while column < width:
            if column + lane() < width:
                total = real(0)
                k = begin
                while k < stop:
                    i = indices[k]
                    if i != padding:
                        weight = weights[k] if is_weighted else real(1)
                        total = fma(weight, table[i * width + column + lane()], total)
                    k += 1
                output[bag * stride + column + lane()] = total * factor
            column += lanes()
        bag += 1


def has_fault(
    indices: Indices,
    offsets: Indices,
    bags: int,
    bags_left: int,
    count: int,
    table_rows: int,
    is_first: int,
) -> bool:
    """Whether there is a wrong offset or index: a sign is left of any negative number."""
    begin = count
    signs = 0
    if bags_left > 0:
        begin = offsets[0]
        signs = begin
        if is_first:
            signs |= -begin
    bag = 0
    stop = begin
    while bag < bags:
        last = stop
        stop = count
        if bag + 1 < bags_left:
            stop = offsets[bag + 1]
        signs |= stop - last
        bag += 1
    signs |= count - stop
    if signs >= 0:
        k = begin
        while k < stop:
            signs |= indices[k] | (table_rows - 1 - indices[k])
            k += 1
    return signs < 0
