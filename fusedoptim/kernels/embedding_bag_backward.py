r"""The gradients of embedding bags, row by row of the table, and the updates made with them.

.. math::
    g_r = \sum_{k : i_k = r} f_k\,\nabla y_{b(k)}

:math:`b(k)` is the bag of index :math:`k` and :math:`f_k` its factor. First the indices are sorted
(:mod:`fusedoptim.kernels.sort_indices`), so that those of a row lie together, in their order. Then
groups of lanes sum each row's gradient, in that order, and update the row:

.. math::
    g &\leftarrow g_r + \lambda\,w_r \\
    s &\leftarrow s + g^2 \quad \text{or} \quad
        s + \frac{1}{n} \sum_j g_j^2 \text{ for the row as a whole} \\
    w_r &\leftarrow w_r - \gamma\,g \quad \text{or} \quad
        w_r - \gamma\,\frac{g}{\sqrt{s} + \epsilon}

A launch's row is a part of a table's sorted indices. A table's row whose indices begin in one part
and end in another belongs to the first. Weight decay :math:`\lambda` reaches the rows in a batch.

Semantics: ``torch.optim.SGD`` and ``torch.optim.Adagrad`` of torch 2.13 on sparse gradients. Source
of one :math:`s` for a row: FBGEMM's ``EXACT_ROWWISE_ADAGRAD``.
"""

from __future__ import annotations

import math
from typing import Any

from fusedoptim.kernels.fetching import AHEAD, fetch_columns
from fusedoptim.kernels.language import (
    VECTOR,
    Grad,
    Indices,
    Output,
    Param,
    RowFlag,
    RowInt,
    RowInteger,
    RowScalar,
    Scalar,
    State,
    Values,
    Vector,
    fetch,
    fma,
    lane,
    lanes,
    load_vector,
    real,
    spread,
    store_vector,
    vector_fma,
    vector_sum,
)

__all__ = [
    "adagrad_rows",
    "rowwise_adagrad_rows",
    "sgd_rows",
    "sum_rows",
]

_LOW = 0xFFFFFFFF


def sum_rows(
    grad: Grad,
    result: Output,
    keys: Indices,
    factors: Values,
    bags_of: Indices,
    sorted_count: RowInt,
    first: RowInteger,
    last: RowInteger,
    width: RowInteger,
    stride: RowInteger,
    is_weighted: RowFlag,
    is_mean: RowFlag,
) -> None:
    """Write the gradient of each row that occurs to ``result``, which has all rows."""
    bags = grad, keys, factors, bags_of, stride, is_weighted, is_mean
    for_each_row(store, fetch_one, (result,), bags, first, last, sorted_count, width)


def store(place: int, g: float, result: Output) -> None:
    """Store one column for each lane."""
    result[place] = g


def sgd_rows(
    param: Param,
    grad: Grad,
    keys: Indices,
    factors: Values,
    bags_of: Indices,
    sorted_count: RowInt,
    first: RowInteger,
    last: RowInteger,
    width: RowInteger,
    stride: RowInteger,
    is_weighted: RowFlag,
    is_mean: RowFlag,
    lr: Scalar,
    weight_decay: Scalar,
) -> None:
    """Make a step of SGD for each row that occurs."""
    bags = grad, keys, factors, bags_of, stride, is_weighted, is_mean
    step = param, lr, weight_decay
    for_each_row(sgd_step, fetch_one, step, bags, first, last, sorted_count, width)


def sgd_step(place: int, g: float, param: Param, lr: float, weight_decay: float) -> None:
    """Update one column for each lane."""
    theta = param[place]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    param[place] = fma(-lr, g, theta)


def adagrad_rows(
    param: Param,
    grad: Grad,
    sum: State,  # noqa: A002 (what torch calls the state)
    keys: Indices,
    factors: Values,
    bags_of: Indices,
    sorted_count: RowInt,
    first: RowInteger,
    last: RowInteger,
    width: RowInteger,
    stride: RowInteger,
    is_weighted: RowFlag,
    is_mean: RowFlag,
    lr: Scalar,
    weight_decay: Scalar,
    eps: Scalar,
) -> None:
    """Make a step of Adagrad for each row that occurs."""
    bags = grad, keys, factors, bags_of, stride, is_weighted, is_mean
    step = param, sum, lr, weight_decay, eps
    for_each_row(adagrad_step, fetch_both, step, bags, first, last, sorted_count, width)


def adagrad_step(
    place: int,
    g: float,
    param: Param,
    sum: State,  # noqa: A002 (what torch calls the state)
    lr: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Update one column for each lane."""
    theta = param[place]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    s = fma(g, g, sum[place])
    sum[place] = s
    param[place] = fma(-lr, g / (math.sqrt(s) + eps), theta)


def rowwise_adagrad_rows(
    param: Param,
    grad: Grad,
    sum: State,  # noqa: A002 (what torch calls the state)
    row_grad: Values,
    keys: Indices,
    factors: Values,
    bags_of: Indices,
    sorted_count: RowInt,
    first: RowInteger,
    last: RowInteger,
    width: RowInteger,
    stride: RowInteger,
    is_weighted: RowFlag,
    is_mean: RowFlag,
    one_over_width: RowScalar,
    lr: Scalar,
    weight_decay: Scalar,
    eps: Scalar,
) -> None:
    """Make a step of Adagrad, with one sum for each row, for each row that occurs.

    ``row_grad`` is room for the gradient of a row. The kernel computes with vectors, as lanes would
    wait for each other at each row's sum of squares.
    """
    bags = grad, keys, factors, bags_of, stride, is_weighted, is_mean
    i = first_row(keys, first, last, sorted_count)
    while i < last and i < sorted_count:
        stop = next_row_after(keys, i, sorted_count)
        row = keys[i] >> 32
        place = row * width
        s = sum[row]
        squares = spread(real(0))
        column = 0
        while column + 4 * VECTOR <= width:
            fetch_ahead(fetch_with_sum, (param, sum), bags, i, stop, sorted_count, width, column, 4)
            g0, g1, g2, g3 = four_vectors(i, stop, column, bags)
            g0 = kept(g0, param, place, row_grad, column, weight_decay)
            g1 = kept(g1, param, place, row_grad, column + VECTOR, weight_decay)
            g2 = kept(g2, param, place, row_grad, column + 2 * VECTOR, weight_decay)
            g3 = kept(g3, param, place, row_grad, column + 3 * VECTOR, weight_decay)
            squares = vector_fma(g0, g0, vector_fma(g1, g1, squares))
            squares = vector_fma(g2, g2, vector_fma(g3, g3, squares))
            column += 4 * VECTOR
        while column + VECTOR <= width:
            fetch_ahead(fetch_with_sum, (param, sum), bags, i, stop, sorted_count, width, column, 1)
            g = vector_of(i, stop, column, bags)
            g = kept(g, param, place, row_grad, column, weight_decay)
            squares = vector_fma(g, g, squares)
            column += VECTOR
        if column < width:
            fetch_ahead(fetch_with_sum, (param, sum), bags, i, stop, sorted_count, width, column, 1)
        rest = real(0)
        while column < width:
            x = sum_of(i, stop, column, bags)
            if weight_decay != 0:
                x = fma(weight_decay, param[place + column], x)
            row_grad[column] = x
            rest = fma(x, x, rest)
            column += 1
        s = fma(one_over_width, vector_sum(squares) + rest, s)
        sum[row] = s
        step_size = -lr / (math.sqrt(s) + eps)
        step = spread(step_size)
        column = 0
        while column + VECTOR <= width:
            theta = load_vector(param, place + column)
            theta = vector_fma(step, load_vector(row_grad, column), theta)
            store_vector(param, place + column, theta)
            column += VECTOR
        while column < width:
            param[place + column] = fma(step_size, row_grad[column], param[place + column])
            column += 1
        i = stop


def kept(
    g: Vector, param: Param, place: int, row_grad: Values, column: int, weight_decay: float
) -> Vector:
    """The gradient of some columns, with weight decay; also store it in ``row_grad``."""
    if weight_decay != 0:
        g = vector_fma(spread(weight_decay), load_vector(param, place + column), g)
    store_vector(row_grad, column, g)
    return g


def for_each_row(
    update: Any,
    fetch_row: Any,
    arguments: Any,
    bags: Any,
    first: int,
    last: int,
    sorted_count: int,
    width: int,
) -> None:
    """Call ``update(place, g, *arguments)`` for all columns of the rows of a part.

    Args:
        update: a function of the kernel's module, of a place in the table and the gradient there.
        fetch_row: a function of a row and a place in it, which prefetches what is updated there.
        arguments: further arguments of both functions.
        bags: where the gradients are, in the order that :func:`sums` has.
        first: the key at which the part begins.
        last: the key after the last one of the part.
        sorted_count: the number of all sorted keys.
        width: the number of columns of a row.
    """
    keys = bags[1]
    i = first_row(keys, first, last, sorted_count)
    while i < last and i < sorted_count:
        stop = next_row_after(keys, i, sorted_count)
        place = (keys[i] >> 32) * width + lane()
        column = 0
        while column + 4 * lanes() <= width:
            fetch_ahead(fetch_row, arguments, bags, i, stop, sorted_count, width, column, 4)
            g0, g1, g2, g3 = sums(i, stop, column, bags)
            update(place + column, g0, *arguments)
            update(place + column + lanes(), g1, *arguments)
            update(place + column + 2 * lanes(), g2, *arguments)
            update(place + column + 3 * lanes(), g3, *arguments)
            column += 4 * lanes()
        while column < width:
            fetch_ahead(fetch_row, arguments, bags, i, stop, sorted_count, width, column, 1)
            if column + lane() < width:
                g = sum_of(i, stop, column + lane(), bags)
                update(place + column, g, *arguments)
            column += lanes()
        i = stop


def fetch_one(each: int, row: int, place: int, values: Any, *_: Any) -> None:
    """Prefetch a row that is updated: one column or four of each of a CPU's lanes."""
    fetch_columns(values, place, each)


def fetch_both(each: int, row: int, place: int, param: Param, state: State, *_: Any) -> None:
    """Prefetch a row of the table and of its state."""
    fetch_columns(param, place, each)
    fetch_columns(state, place, each)


def fetch_with_sum(each: int, row: int, place: int, param: Param, state: State) -> None:
    """Prefetch a row of the table and its one value of state."""
    fetch_columns(param, place, each)
    fetch(state, row, 1)


def fetch_ahead(
    fetch_row: Any,
    arguments: Any,
    bags: Any,
    i: int,
    stop: int,
    sorted_count: int,
    width: int,
    column: int,
    each: int,
) -> None:
    """Prefetch the gradients and rows that later keys need."""
    grad, keys, _, bags_of, stride, is_weighted, _ = bags
    while i < stop and i + AHEAD < sorted_count:
        key = keys[i + AHEAD]
        payload = key & _LOW
        bag = bags_of[payload] if is_weighted else payload
        fetch_row(each, key >> 32, (key >> 32) * width + column, *arguments)
        fetch_columns(grad, bag * stride + column, each)
        i += 1


def first_row(keys: Indices, first: int, last: int, sorted_count: int) -> int:
    """The key at which the first row of this part begins."""
    i = first
    while i > 0 and i < last and i < sorted_count and keys[i] >> 32 == keys[i - 1] >> 32:
        i += 1
    return i


def next_row_after(keys: Indices, i: int, sorted_count: int) -> int:
    """The key after the last one of the row whose first key is ``i``."""
    stop = i + 1
    while stop < sorted_count and keys[stop] >> 32 == keys[i] >> 32:
        stop += 1
    return stop


def sums(i: int, stop: int, column: int, bags: Any) -> tuple[float, float, float, float]:
    """The gradient of four columns of a row, for each lane; plain sums have their own loop."""
    grad, keys, factors, bags_of, stride, is_weighted, is_mean = bags
    g0 = g1 = g2 = g3 = real(0)
    if is_weighted or is_mean:
        while i < stop:
            payload = keys[i] & _LOW
            factor = factors[payload]
            bag = bags_of[payload] if is_weighted else payload
            place = bag * stride + column + lane()
            g0 = fma(factor, grad[place], g0)
            g1 = fma(factor, grad[place + lanes()], g1)
            g2 = fma(factor, grad[place + 2 * lanes()], g2)
            g3 = fma(factor, grad[place + 3 * lanes()], g3)
            i += 1
    while i < stop:
        place = (keys[i] & _LOW) * stride + column + lane()
        g0 += grad[place]
        g1 += grad[place + lanes()]
        g2 += grad[place + 2 * lanes()]
        g3 += grad[place + 3 * lanes()]
        i += 1
    return g0, g1, g2, g3


def sum_of(i: int, stop: int, column: int, bags: Any) -> float:
    """The gradient of one column of a row, for each lane."""
    grad, keys, factors, bags_of, stride, is_weighted, is_mean = bags
    g = real(0)
    while i < stop:
        payload = keys[i] & _LOW
        factor = factors[payload] if is_weighted or is_mean else real(1)
        bag = bags_of[payload] if is_weighted else payload
        g = fma(factor, grad[bag * stride + column], g)
        i += 1
    return g


def vector_of(i: int, stop: int, column: int, bags: Any) -> Vector:
    """The gradient of one vector of columns of a row."""
    grad, keys, factors, bags_of, stride, is_weighted, is_mean = bags
    g = spread(real(0))
    while i < stop:
        payload = keys[i] & _LOW
        factor = factors[payload] if is_weighted or is_mean else real(1)
        bag = bags_of[payload] if is_weighted else payload
        g = vector_fma(spread(factor), load_vector(grad, bag * stride + column), g)
        i += 1
    return g


def four_vectors(
    i: int, stop: int, column: int, bags: Any
) -> tuple[Vector, Vector, Vector, Vector]:
    """The gradient of four vectors of columns of a row."""
    grad, keys, factors, bags_of, stride, is_weighted, is_mean = bags
    g0 = g1 = g2 = g3 = spread(real(0))
    while i < stop:
        payload = keys[i] & _LOW
        factor = spread(factors[payload] if is_weighted or is_mean else real(1))
        bag = bags_of[payload] if is_weighted else payload
        place = bag * stride + column
        g0 = vector_fma(factor, load_vector(grad, place), g0)
        g1 = vector_fma(factor, load_vector(grad, place + VECTOR), g1)
        g2 = vector_fma(factor, load_vector(grad, place + 2 * VECTOR), g2)
        g3 = vector_fma(factor, load_vector(grad, place + 3 * VECTOR), g3)
        i += 1
    return g0, g1, g2, g3
