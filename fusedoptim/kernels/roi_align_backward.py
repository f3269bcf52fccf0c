r"""The gradient of ROIAlign: each pixel's, from all bins of all boxes that it is a tap of.

.. math::
    \frac{\partial \ell}{\partial x_{c,i,j}} =
        \sum_{b} \sum_{p,q} u_{b,p,i}\, v_{b,q,j}\, \frac{\partial \ell}{\partial o_{b,c,p,q}}

:math:`u` and :math:`v` are the weights of the taps of box :math:`b`: see
:mod:`fusedoptim.kernels.roi_align`. A launch's row is a band of a map's rows, which adds up what
the boxes pass on to it in their order. So no other row writes to its pixels, and the sum of a pixel
does not depend on where bands begin.

Semantics: ``torchvision.ops.roi_align`` of torchvision 0.28. Source: He et al., "Mask R-CNN" (ICCV
2017), section 3.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    Indices,
    Input,
    Integer,
    Length,
    RowInteger,
    Values,
    fma,
    lane,
    lanes,
    uniform,
)

__all__ = ["roi_align_backward", "roi_align_backward_strided"]


def roi_align_backward(
    length: Length,
    grad: Input,
    sums: Values,
    boxes: Indices,
    count: RowInteger,
    begin: RowInteger,
    stop: RowInteger,
    y_places: Indices,
    y_weights: Values,
    y_counts: Indices,
    x_places: Indices,
    x_weights: Values,
    x_counts: Indices,
    y_bins: Integer,
    x_bins: Integer,
    y_room: Integer,
    x_room: Integer,
    channels: Integer,
) -> None:
    """The gradient of a band of rows, from ``count`` boxes in their order.

    The band is the elements from ``begin`` to ``stop`` of a map, whose gradients are ``sums``.
    """
    spread(
        grad,
        sums,
        boxes,
        count,
        begin,
        stop,
        y_places,
        y_weights,
        y_counts,
        x_places,
        x_weights,
        x_counts,
        y_bins,
        x_bins,
        y_room,
        x_room,
        channels,
        1,
    )


def roi_align_backward_strided(
    length: Length,
    grad: Input,
    sums: Values,
    boxes: Indices,
    count: RowInteger,
    begin: RowInteger,
    stop: RowInteger,
    y_places: Indices,
    y_weights: Values,
    y_counts: Indices,
    x_places: Indices,
    x_weights: Values,
    x_counts: Indices,
    y_bins: Integer,
    x_bins: Integer,
    y_room: Integer,
    x_room: Integer,
    channels: Integer,
    spacing: Integer,
) -> None:
    """Like :func:`roi_align_backward`, for channels ``spacing`` elements apart."""
    spread(
        grad,
        sums,
        boxes,
        count,
        begin,
        stop,
        y_places,
        y_weights,
        y_counts,
        x_places,
        x_weights,
        x_counts,
        y_bins,
        x_bins,
        y_room,
        x_room,
        channels,
        spacing,
    )


def spread(
    grad: Input,
    sums: Values,
    boxes: Indices,
    count: int,
    begin: int,
    stop: int,
    y_places: Indices,
    y_weights: Values,
    y_counts: Indices,
    x_places: Indices,
    x_weights: Values,
    x_counts: Indices,
    y_bins: int,
    x_bins: int,
    y_room: int,
    x_room: int,
    channels: int,
    spacing: int,
) -> None:
    """Add to the pixels of a band what the bins of boxes pass on to them."""
    bins = y_bins * x_bins
    b = 0
    while b < count:
        box = uniform(boxes[b])
        p = 0
        while p < y_bins:
            y = (box * y_bins + p) * y_room
            y_end = y + uniform(y_counts[box * y_bins + p])
            while y < y_end and uniform(y_places[y]) < begin:
                y += 1
            while y < y_end and uniform(y_places[y_end - 1]) >= stop:
                y_end -= 1
            q = 0
            while q < x_bins and y < y_end:
                x = (box * x_bins + q) * x_room
                x_end = x + uniform(x_counts[box * x_bins + q])
                g = box * channels * bins + p * x_bins + q
                first = 0
                while first < channels:
                    c = first + lane()
                    if first + 4 * lanes() <= channels:
                        add_four(
                            sums,
                            c * spacing,
                            lanes() * spacing,
                            grad[g + c * bins],
                            grad[g + (c + lanes()) * bins],
                            grad[g + (c + 2 * lanes()) * bins],
                            grad[g + (c + 3 * lanes()) * bins],
                            y_places,
                            y_weights,
                            y,
                            y_end,
                            x_places,
                            x_weights,
                            x,
                            x_end,
                        )
                    else:
                        while c < channels:
                            add_one(
                                sums,
                                c * spacing,
                                grad[g + c * bins],
                                y_places,
                                y_weights,
                                y,
                                y_end,
                                x_places,
                                x_weights,
                                x,
                                x_end,
                            )
                            c += lanes()
                    first += 4 * lanes()
                q += 1
            p += 1
        b += 1


def add_four(
    sums: Values,
    i: int,
    step: int,
    g0: float,
    g1: float,
    g2: float,
    g3: float,
    y_places: Indices,
    y_weights: Values,
    y: int,
    y_end: int,
    x_places: Indices,
    x_weights: Values,
    x: int,
    x_end: int,
) -> None:
    """Add the gradient of one bin in four channels to the pixels that it is an average of."""
    while y < y_end:
        u = y_weights[y]
        h0, h1, h2, h3 = u * g0, u * g1, u * g2, u * g3
        k = x
        while k < x_end:
            a = uniform(y_places[y] + x_places[k]) + i
            v = x_weights[k]
            s0, s1 = fma(v, h0, sums[a]), fma(v, h1, sums[a + step])
            s2, s3 = fma(v, h2, sums[a + 2 * step]), fma(v, h3, sums[a + 3 * step])
            sums[a] = s0
            sums[a + step] = s1
            sums[a + 2 * step] = s2
            sums[a + 3 * step] = s3
            k += 1
        y += 1


def add_one(
    sums: Values,
    i: int,
    g: float,
    y_places: Indices,
    y_weights: Values,
    y: int,
    y_end: int,
    x_places: Indices,
    x_weights: Values,
    x: int,
    x_end: int,
) -> None:
    """Like :func:`add_four`, in one channel."""
    while y < y_end:
        h = y_weights[y] * g
        k = x
        while k < x_end:
            a = uniform(y_places[y] + x_places[k]) + i
            sums[a] = fma(x_weights[k], h, sums[a])
            k += 1
        y += 1
