r"""DLRM's interaction: the first feature of a sample, and the dot product of each pair of features.

.. math::
    y &= (x_0,\; x_1 \cdot x_0,\; x_2 \cdot x_0,\; x_2 \cdot x_1,\; x_3 \cdot x_0, \dots) \\
    \frac{\partial \ell}{\partial x_i} &= \sum_{j \ne i} g_{ij} x_j + [i = 0]\, g_0

:math:`g_{ij}` is the gradient of the product of features i and j, :math:`g_0` that of :math:`x_0`.
A launch's row is a run of samples, of ``count`` features of ``width`` numbers each. Feature f of
sample s begins at element ``offsets[f] + s * strides[f]``: features may be separate tensors. Each
sample is copied to ``scratch``, in the arithmetic dtype and padded with zeros, and multiplied in
blocks of four features, while the next one is prefetched.

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems" (2019).
"""

from __future__ import annotations

from typing import Any

from fusedoptim.kernels.language import (
    VECTOR,
    Indices,
    Input,
    Output,
    RowInteger,
    Values,
    fetch,
    load_vector,
    quarter_sums,
    real,
    repeated_quarter,
    spread,
    store_quarter,
    store_vector,
    vector_fma,
)

__all__ = ["interaction", "interaction_backward"]


def interaction(
    features: Input,
    offsets: Indices,
    strides: Indices,
    output: Output,
    scratch: Values,
    first: RowInteger,
    samples: RowInteger,
    count: RowInteger,
    width: RowInteger,
    padded_count: RowInteger,
    padded_width: RowInteger,
) -> None:
    """The interactions of ``samples`` samples from the ``first`` on.

    ``padded_count`` is a multiple of 8, ``padded_width`` of 16; ``scratch`` has a matrix of the
    former times the latter, and a square one of the former.
    """
    products = padded_count * padded_width
    clear(scratch, 0, products)
    place = sample = 0
    while sample < samples:
        f = 0
        while f < count:
            start = offsets[f] + (first + sample) * strides[f]
            pack(features, start, width, scratch, (f >> 2) * 4 * padded_width + (f & 3) * 4)
            fetch_ahead(features, start + strides[f], width)
            f += 1
        copy(features, offsets[0] + (first + sample) * strides[0], width, output, place)
        place += width

        row = 0
        while row < count:
            column = 0
            while column <= row:
                multiply_block(scratch, row, column, padded_count, padded_width)
                column += 8
            row += 4

        # A row's last vector may write more than the row, which the next rows write again.
        end = place + (count * (count - 1) >> 1)
        row = 1
        while row < count:
            k, source = 0, products + row * padded_count
            while k < row and place + k + VECTOR <= end:
                store_vector(output, place + k, load_vector(scratch, source + k))
                k += VECTOR
            while k < row:
                output[place + k] = scratch[source + k]
                k += 1
            place += row
            row += 1
        sample += 1


def clear(scratch: Values, start: int, length: int) -> None:
    """Write zeros; ``length`` is a multiple of VECTOR."""
    k = 0
    while k < length:
        store_vector(scratch, start + k, spread(real(0)))
        k += VECTOR


def pack(features: Input, start: int, width: int, scratch: Values, place: int) -> None:
    """Copy a feature in quarters of vectors, interleaved with those of three other features."""
    k = 0
    while k + VECTOR <= width:
        x = load_vector(features, start + k)
        store_quarter(scratch, place + 4 * k, x, 0)
        store_quarter(scratch, place + 4 * k + 16, x, 1)
        store_quarter(scratch, place + 4 * k + 32, x, 2)
        store_quarter(scratch, place + 4 * k + 48, x, 3)
        k += VECTOR
    while k < width:
        scratch[place + 4 * (k & -4) + (k & 3)] = features[start + k]
        k += 1


def copy(source: Input, start: int, length: int, target: Output, place: int) -> None:
    """Copy elements, converted to the target's dtype."""
    k = 0
    while k + VECTOR <= length:
        store_vector(target, place + k, load_vector(source, start + k))
        k += VECTOR
    while k < length:
        target[place + k] = source[start + k]
        k += 1


def fetch_ahead(values: Any, start: int, width: int) -> None:
    """Prefetch a feature of the next sample."""
    k = 0
    while k < width:
        fetch(values, start + k, 64)
        k += 64


def multiply_block(
    scratch: Values, row: int, column: int, padded_count: int, padded_width: int
) -> None:
    """The products of four packed features with eight, to the square matrix behind them."""
    x, y = row * padded_width, column * padded_width
    z = y + 4 * padded_width
    zero = spread(real(0))
    # A quarter of each is a part of the product of one feature of the four with one of the eight.
    y0, y1, y2, y3 = zero, zero, zero, zero
    z0, z1, z2, z3 = zero, zero, zero, zero
    end = x + 4 * padded_width
    while x < end:
        of_y, of_z = load_vector(scratch, y), load_vector(scratch, z)
        of_x = repeated_quarter(scratch, x)
        y0, z0 = vector_fma(of_x, of_y, y0), vector_fma(of_x, of_z, z0)
        of_x = repeated_quarter(scratch, x + 4)
        y1, z1 = vector_fma(of_x, of_y, y1), vector_fma(of_x, of_z, z1)
        of_x = repeated_quarter(scratch, x + 8)
        y2, z2 = vector_fma(of_x, of_y, y2), vector_fma(of_x, of_z, z2)
        of_x = repeated_quarter(scratch, x + 12)
        y3, z3 = vector_fma(of_x, of_y, y3), vector_fma(of_x, of_z, z3)
        x += 16
        y += 16
        z += 16
    of_y, of_z = quarter_sums(y0, y1, y2, y3), quarter_sums(z0, z1, z2, z3)
    place = padded_count * padded_width + row * padded_count + column
    store_quarter(scratch, place, of_y, 0)
    store_quarter(scratch, place + 4, of_z, 0)
    place += padded_count
    store_quarter(scratch, place, of_y, 1)
    store_quarter(scratch, place + 4, of_z, 1)
    place += padded_count
    store_quarter(scratch, place, of_y, 2)
    store_quarter(scratch, place + 4, of_z, 2)
    place += padded_count
    store_quarter(scratch, place, of_y, 3)
    store_quarter(scratch, place + 4, of_z, 3)


def interaction_backward(
    grad: Input,
    features: Input,
    offsets: Indices,
    strides: Indices,
    grad_features: Output,
    grad_offsets: Indices,
    grad_strides: Indices,
    scratch: Values,
    first: RowInteger,
    samples: RowInteger,
    count: RowInteger,
    width: RowInteger,
    padded_count: RowInteger,
    padded_width: RowInteger,
) -> None:
    """The gradients of the features.

    ``padded_count`` is a multiple of 8, ``padded_width`` of 32; ``scratch`` has two matrices of the
    former times the latter, and a square one of the former.
    """
    results = padded_count * padded_width
    matrix = 2 * results
    clear(scratch, 0, matrix + padded_count * padded_count)
    place = sample = 0
    while sample < samples:
        f = 0
        while f < count:
            start = offsets[f] + (first + sample) * strides[f]
            copy(features, start, width, scratch, f * padded_width)
            fetch_ahead(features, start + strides[f], width)
            f += 1

        of_first = place
        place += width
        row = 1
        while row < count:
            column = 0
            while column < row:
                of_product = grad[place + column]
                scratch[matrix + row * padded_count + column] = of_product
                scratch[matrix + column * padded_count + row] = of_product
                column += 1
            place += row
            row += 1

        row = 0
        while row < count:
            column = 0
            while column < width:
                multiply_rows(scratch, row, column, count, padded_count, padded_width)
                column += 2 * VECTOR
            row += 4

        add(grad, of_first, width, scratch, results)
        f = 0
        while f < count:
            start = grad_offsets[f] + (first + sample) * grad_strides[f]
            copy(scratch, results + f * padded_width, width, grad_features, start)
            fetch_ahead(grad_features, start + grad_strides[f], width)
            f += 1
        sample += 1


def multiply_rows(
    scratch: Values, row: int, column: int, count: int, padded_count: int, padded_width: int
) -> None:
    """The sums of all features, times four rows of the square matrix, in 32 columns."""
    zero = spread(real(0))
    x0, x1, x2, x3 = zero, zero, zero, zero
    y0, y1, y2, y3 = zero, zero, zero, zero
    factors = 2 * padded_count * padded_width + row
    place = column
    end = column + count * padded_width
    while place < end:
        x, y = load_vector(scratch, place), load_vector(scratch, place + VECTOR)
        factor = spread(scratch[factors])
        x0, y0 = vector_fma(factor, x, x0), vector_fma(factor, y, y0)
        factor = spread(scratch[factors + 1])
        x1, y1 = vector_fma(factor, x, x1), vector_fma(factor, y, y1)
        factor = spread(scratch[factors + 2])
        x2, y2 = vector_fma(factor, x, x2), vector_fma(factor, y, y2)
        factor = spread(scratch[factors + 3])
        x3, y3 = vector_fma(factor, x, x3), vector_fma(factor, y, y3)
        factors += padded_count
        place += padded_width
    place = (padded_count + row) * padded_width + column
    store_vector(scratch, place, x0)
    store_vector(scratch, place + VECTOR, y0)
    place += padded_width
    store_vector(scratch, place, x1)
    store_vector(scratch, place + VECTOR, y1)
    place += padded_width
    store_vector(scratch, place, x2)
    store_vector(scratch, place + VECTOR, y2)
    place += padded_width
    store_vector(scratch, place, x3)
    store_vector(scratch, place + VECTOR, y3)


def add(source: Input, start: int, length: int, target: Values, place: int) -> None:
    """Add elements to others."""
    k = 0
    while k + VECTOR <= length:
        total = load_vector(target, place + k) + load_vector(source, start + k)
        store_vector(target, place + k, total)
        k += VECTOR
    while k < length:
        target[place + k] += source[start + k]
        k += 1
