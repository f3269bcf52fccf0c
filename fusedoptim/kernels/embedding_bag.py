r"""Embedding bags: sums or means of the rows of a table that each bag names.

.. math::
    y_b = f_b \sum_{k = o_b}^{o_{b+1} - 1} v_k\,w_{i_k}

:math:`i` are ``indices``, :math:`o` ``offsets``, :math:`v` ``weights`` (1 without), and :math:`f_b`
is 1 for a sum and one over the number of terms for a mean. Indices equal to ``padding`` have no
term. A launch's row is a run of bags of one table, of ``width`` columns; bags lie ``stride``
elements apart in the output. :mod:`fusedoptim.kernels.embedding_bag_backward` computes the
gradients.

Semantics: ``torch.nn.functional.embedding_bag`` of torch 2.13.
"""

from __future__ import annotations

from typing import Any

from fusedoptim.kernels.fetching import AHEAD, fetch_columns
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
    """Compute the first ``bags`` of the ``bags_left`` bags in ``offsets``; these end at ``count``.

    The kernel writes zeros and sets ``faults[0]`` if an index is not a row of the table, if a bag
    ends before it begins, or if the first offset of the table, which the row with ``is_first`` has,
    is not 0. Plain sums have a loop of their own: with fewer instructions for each row, a core
    fetches more rows at once. For the same reason a plain bag of one index is copied if sums are
    rounded.
    """
    if has_fault(indices, (offsets, bags_left, count), bags, table_rows, is_first):
        faults[0] = 1
        count = 0
        bags_left = 0
    bounds = offsets, bags_left, count
    terms = weights, is_weighted, padding, is_mean
    if padding < 0 and not is_weighted:
        add_bags(add_plainly, table, indices, bounds, terms, output, bags, width, stride)
    else:
        add_bags(add_terms, table, indices, bounds, terms, output, bags, width, stride)


def add_bags(
    add_four: Any,
    table: Input,
    indices: Indices,
    bounds: Any,
    terms: Any,
    output: Output,
    bags: int,
    width: int,
    stride: int,
) -> None:
    """Compute all bags; ``add_four`` sums four columns of a bag for each lane.

    ``bounds`` are the offsets, their number, and where the last bag ends. ``terms`` are the weights
    of the indices, whether there are any, the padding index, and whether bags are means.
    """
    last = begin_of(bags, bounds)
    stop = begin_of(0, bounds)
    bag = 0
    while bag < bags:
        begin = stop
        stop = begin_of(bag + 1, bounds)
        run = begin, stop, last
        factor = factor_of(indices, begin, stop, terms)
        place = bag * stride + lane()
        column = 0
        while column + 4 * lanes() <= width:
            add_four(table, indices, terms, run, output, place + column, factor, width, column)
            column += 4 * lanes()
        while column < width:
            fetch_run(table, indices, run, width, column)
            if column + lane() < width:
                total = sum_of(table, indices, terms, run, width, column)
                output[place + column] = total * factor
            column += lanes()
        bag += 1


def add_plainly(
    table: Input,
    indices: Indices,
    terms: Any,
    run: Any,
    output: Output,
    place: int,
    factor: float,
    width: int,
    column: int,
) -> None:
    """Sum four columns of a bag without weights or padding, for each lane.

    ``run`` is where the bag begins, where it ends, and where the last bag ends.
    """
    k, stop, last = run
    if rounds(output) and stop - k == 1:
        fetch_ahead(table, indices, k, last, width, column, 4)
        copy(table, indices[k] * width + column + lane(), output, place)
    else:
        x0 = x1 = x2 = x3 = real(0)
        while k < stop:
            fetch_ahead(table, indices, k, last, width, column, 4)
            source = indices[k] * width + column + lane()
            x0 += table[source]
            x1 += table[source + lanes()]
            x2 += table[source + 2 * lanes()]
            x3 += table[source + 3 * lanes()]
            k += 1
        store_four(x0, x1, x2, x3, output, place, factor)


def add_terms(
    table: Input,
    indices: Indices,
    terms: Any,
    run: Any,
    output: Output,
    place: int,
    factor: float,
    width: int,
    column: int,
) -> None:
    """Sum four columns of any bag, for each lane."""
    weights, is_weighted, padding, _ = terms
    k, stop, last = run
    x0 = x1 = x2 = x3 = real(0)
    while k < stop:
        fetch_ahead(table, indices, k, last, width, column, 4)
        i = indices[k]
        if i != padding:
            weight = weights[k] if is_weighted else real(1)
            source = i * width + column + lane()
            x0 = fma(weight, table[source], x0)
            x1 = fma(weight, table[source + lanes()], x1)
            x2 = fma(weight, table[source + 2 * lanes()], x2)
            x3 = fma(weight, table[source + 3 * lanes()], x3)
        k += 1
    store_four(x0, x1, x2, x3, output, place, factor)


def store_four(
    x0: float, x1: float, x2: float, x3: float, output: Output, place: int, factor: float
) -> None:
    """Store a bag's sums, times its factor."""
    output[place] = x0 * factor
    output[place + lanes()] = x1 * factor
    output[place + 2 * lanes()] = x2 * factor
    output[place + 3 * lanes()] = x3 * factor


def begin_of(bag: int, bounds: Any) -> int:
    """Where a bag begins among the indices: where the one before ends."""
    offsets, bags_left, count = bounds
    place: int = count
    if bag < bags_left:
        place = offsets[bag]
    return place


def fetch_ahead(
    table: Input, indices: Indices, k: int, last: int, width: int, column: int, each: int
) -> None:
    """Prefetch the row of an index after the k-th: one column or four of each of a CPU's lanes."""
    if k + AHEAD < last:
        fetch_columns(table, indices[k + AHEAD] * width + column, each)


def copy(table: Input, source: int, output: Output, target: int) -> None:
    """Copy four columns of a row for each lane."""
    output[target] = table[source]
    output[target + lanes()] = table[source + lanes()]
    output[target + 2 * lanes()] = table[source + 2 * lanes()]
    output[target + 3 * lanes()] = table[source + 3 * lanes()]


def factor_of(indices: Indices, k: int, stop: int, terms: Any) -> float:
    """The factor of a bag's sum."""
    _, _, padding, is_mean = terms
    factor = real(1)
    if is_mean:
        count = real(0)
        while k < stop:
            if indices[k] != padding:
                count += real(1)
            k += 1
        if count > real(0):
            factor = real(1) / count
    return factor


def fetch_run(table: Input, indices: Indices, run: Any, width: int, column: int) -> None:
    """Prefetch one column of each lane for each index of a bag."""
    k, stop, last = run
    while k < stop:
        fetch_ahead(table, indices, k, last, width, column, 1)
        k += 1


def sum_of(table: Input, indices: Indices, terms: Any, run: Any, width: int, column: int) -> float:
    """The sum of one column of a bag, for each lane."""
    weights, is_weighted, padding, _ = terms
    k, stop, _ = run
    total = real(0)
    while k < stop:
        i = indices[k]
        if i != padding:
            weight = weights[k] if is_weighted else real(1)
            total = fma(weight, table[i * width + column + lane()], total)
        k += 1
    return total


def has_fault(indices: Indices, bounds: Any, bags: int, table_rows: int, is_first: int) -> bool:
    """Whether an offset or index is wrong: the sign bit of any negative number tells."""
    _, bags_left, count = bounds
    begin = begin_of(0, bounds)
    signs: int = 0
    if bags_left > 0:
        signs = begin
        if is_first:
            signs |= -begin
    bag = 0
    stop = begin
    while bag < bags:
        last = stop
        stop = begin_of(bag + 1, bounds)
        signs |= stop | (stop - last)  # which does not overflow if both are 0 or more
        bag += 1
    signs |= count - stop
    if signs >= 0:
        k = begin
        while k < stop:
            signs |= indices[k] | (table_rows - 1 - indices[k])
            k += 1
    return signs < 0
