r"""Gradients of embedding bags, row by row of the table, and the updates that they make at once.

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

from fusedoptim.kernels.language import (
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
    fma,
    group_sum,
    lane,
    lanes,
    real,
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
    """The gradient of each row that occurs, written to ``result``, which has all rows."""
    i = first_row(keys, first, last, sorted_count)
    while i < last and i < sorted_count:
        stop = next_row_after(keys, i, sorted_count)
        place = (keys[i] >> 32) * width + lane()
        column = 0
        while column + 4 * lanes() <= width:
            g0, g1, g2, g3 = sums(
                grad, keys, factors, bags_of, i, stop, column, stride, is_weighted, is_mean
            )
            result[place + column] = g0
            result[place + column + lanes()] = g1
            result[place + column + 2 * lanes()] = g2
            result[place + column + 3 * lanes()] = g3
            column += 4 * lanes()
        while column < width:
            if column + lane() < width:
                result[place + column] = sum_of(
                    grad, keys, factors, bags_of, i, stop, column, stride, is_weighted, is_mean
                )
            column += lanes()
        i = stop


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
    """A step of SGD for each row that occurs."""
    i = first_row(keys, first, last, sorted_count)
    while i < last and i < sorted_count:
        stop = next_row_after(keys, i, sorted_count)
        place = (keys[i] >> 32) * width + lane()
        column = 0
        while column + 4 * lanes() <= width:
            g0, g1, g2, g3 = sums(
                grad, keys, factors, bags_of, i, stop, column, stride, is_weighted, is_mean
            )
            sgd_step(param, place + column, g0, lr, weight_decay)
            sgd_step(param, place + column + lanes(), g1, lr, weight_decay)
            sgd_step(param, place + column + 2 * lanes(), g2, lr, weight_decay)
            sgd_step(param, place + column + 3 * lanes(), g3, lr, weight_decay)
            column += 4 * lanes()
        while column < width:
            if column + lane() < width:
                g = sum_of(
                    grad, keys, factors, bags_of, i, stop, column, stride, is_weighted, is_mean
                )
                sgd_step(param, place + column, g, lr, weight_decay)
            column += lanes()
        i = stop


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
    """A step of Adagrad for each row that occurs."""
    i = first_row(keys, first, last, sorted_count)
    while i < last and i < sorted_count:
        stop = next_row_after(keys, i, sorted_count)
        place = (keys[i] >> 32) * width + lane()
        column = 0
        while column + 4 * lanes() <= width:
            g0, g1, g2, g3 = sums(
                grad, keys, factors, bags_of, i, stop, column, stride, is_weighted, is_mean
            )
            adagrad_step(param, sum, place + column, g0, lr, weight_decay, eps)
            adagrad_step(param, sum, place + column + lanes(), g1, lr, weight_decay, eps)
            adagrad_step(param, sum, place + column + 2 * lanes(), g2, lr, weight_decay, eps)
            adagrad_step(param, sum, place + column + 3 * lanes(), g3, lr, weight_decay, eps)
            column += 4 * lanes()
        while column < width:
            if column + lane() < width:
                g = sum_of(
                    grad, keys, factors, bags_of, i, stop, column, stride, is_weighted, is_mean
                )
                adagrad_step(param, sum, place + column, g, lr, weight_decay, eps)
            column += lanes()
        i = stop


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
    """A step of Adagrad, with one sum for a row, for each row that occurs.

    ``row_grad`` is room for the gradient of a row.
    """
    i = first_row(keys, first, last, sorted_count)
    while i < last and i < sorted_count:
        stop = next_row_after(keys, i, sorted_count)
        row = keys[i] >> 32
        place = row * width + lane()
        s = sum[row]
        squares = real(0)
        column = 0
        while column < width:
            if column + lane() < width:
                g = sum_of(
                    grad, keys, factors, bags_of, i, stop, column, stride, is_weighted, is_mean
                )
                if weight_decay != 0:
                    g = fma(weight_decay, param[place + column], g)
                row_grad[column + lane()] = g
                squares = fma(g, g, squares)
            column += lanes()
        s = fma(one_over_width, group_sum(squares), s)
        step_size = lr / (math.sqrt(s) + eps)
        column = lane()
        while column < width:
            theta = param[row * width + column]
            param[row * width + column] = fma(-step_size, row_grad[column], theta)
            column += lanes()
        if lane() == 0:
            sum[row] = s
        i = stop


def first_row(keys: Indices, first: int, last: int, sorted_count: int) -> int:
    """Where the first row begins whose indices begin in this part."""
    i = first
    while i > 0 and i < last and i < sorted_count and keys[i] >> 32 == keys[i - 1] >> 32:
        i += 1
    return i


def next_row_after(keys: Indices, i: int, sorted_count: int) -> int:
    """Where the indices of a row end, of which the first is ``i``."""
    stop = i + 1
    while stop < sorted_count and keys[stop] >> 32 == keys[i] >> 32:
        stop += 1
    return stop


def sums(
    grad: Grad,
    keys: Indices,
    factors: Values,
    bags_of: Indices,
    i: int,
    stop: int,
    column: int,
    stride: int,
    is_weighted: int,
    is_mean: int,
) -> tuple[float, float, float, float]:
    """A row's gradient in four columns of each lane."""
    g0 = g1 = g2 = g3 = real(0)
    while i < stop:
        bag = keys[i] & _LOW
        factor = real(1)
        if is_mean:
            factor = factors[bag]
        if is_weighted:
            factor = factors[bag]
            bag = bags_of[bag]
        place = bag * stride + column + lane()
        g0 = fma(factor, grad[place], g0)
        g1 = fma(factor, grad[place + lanes()], g1)
        g2 = fma(factor, grad[place + 2 * lanes()], g2)
        g3 = fma(factor, grad[place + 3 * lanes()], g3)
        i += 1
    return g0, g1, g2, g3


def sum_of(
    grad: Grad,
    keys: Indices,
    factors: Values,
    bags_of: Indices,
    i: int,
    stop: int,
    column: int,
    stride: int,
    is_weighted: int,
    is_mean: int,
) -> float:
    """A row's gradient in one column of each lane."""
    g = real(0)
    while i < stop:
        bag = keys[i] & _LOW
        factor = real(1)
        if is_mean:
            factor = factors[bag]
        if is_weighted:
            factor = factors[bag]
            bag = bags_of[bag]
        g = fma(factor, grad[bag * stride + column + lane()], g)
        i += 1
    return g


def sgd_step(param: Param, place: int, g: float, lr: float, weight_decay: float) -> None:
    """Update one column of each lane."""
    theta = param[place]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    param[place] = fma(-lr, g, theta)


def adagrad_step(
    param: Param,
    sum: State,  # noqa: A002 (what torch calls the state)
    place: int,
    g: float,
    lr: float,
    weight_decay: float,
    eps: float,
) -> None:
    """Update one column of each lane."""
    theta = param[place]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    s = fma(g, g, sum[place])
    sum[place] = s
    param[place] = fma(-lr, g / (math.sqrt(s) + eps), theta)
