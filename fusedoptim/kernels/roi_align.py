r"""ROIAlign: a map averaged over each bin of a box, by bilinear interpolation.

.. math::
    o_{c,p,q} = \sum_{i} \sum_{j} u_{p,i}\, v_{q,j}\, x_{c,i,j}
    \qquad
    u_{p,i} = \frac{1}{n} \sum_{s=0}^{n-1} \max(0, 1 - |y_s - i|)
    \qquad
    y_s = y_0 + p h + (s + \tfrac12) \frac{h}{n}

Bin :math:`p` of a side has :math:`n` samples at :math:`y_s`; :math:`h` is its size. A sample
outside of :math:`[-1, H]` counts as zero, and one closer than that to the border is moved onto the
map. The weight of a pixel is a product of one of its row and one of its column, so each side has a
list of the pixels that its bins touch, the **taps**, and their weights: :func:`roi_align_taps`
makes them once for all channels. A pixel that several samples of a bin touch is one tap.

Lanes are channels. A map has its channels side by side (channels last), or, for the kernels with
``_strided``, ``spacing`` elements apart.

Semantics: ``torchvision.ops.roi_align`` of torchvision 0.28. Source: He et al., "Mask R-CNN" (ICCV
2017), section 3.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    Indices,
    Input,
    Integer,
    Length,
    Output,
    RowInteger,
    RowScalar,
    Values,
    fma,
    lane,
    lanes,
    real,
    uniform,
)

__all__ = [
    "roi_align",
    "roi_align_strided",
    "roi_align_taps",
]


def roi_align_taps(
    length: Length,
    bins: RowInteger,
    start: RowScalar,
    extent: RowScalar,
    samples: RowInteger,
    size: RowInteger,
    stride: RowInteger,
    room: RowInteger,
    places: Indices,
    weights: Values,
    counts: Indices,
) -> None:
    """The taps of one side of a box: those of bin ``p`` begin at element ``p * room``.

    ``extent`` is the size of a bin and ``size`` that of the map; places count ``stride`` elements
    for each pixel.
    """
    p = 0
    while p < bins:
        first = p * room
        k = first
        s = 0
        while s < samples:
            rising = s if extent >= real(0) else samples - 1 - s
            step = (real(rising) + real(0.5)) * extent / real(samples)
            at = start + real(p) * extent + step
            if at >= real(-1) and at <= real(size):
                if at < real(0):
                    at = real(0)
                low = int(at)
                high = low + 1
                if low >= size - 1:
                    low = size - 1
                    high = low
                    at = real(low)
                upper = at - real(low)
                lower = real(1) - upper
                k = add_tap(places, weights, first, k, low * stride, lower / real(samples))
                k = add_tap(places, weights, first, k, high * stride, upper / real(samples))
            s += 1
        counts[p] = k - first
        p += 1


def add_tap(places: Indices, weights: Values, first: int, k: int, place: int, weight: float) -> int:
    """Add to the weight of one of the last two taps, or append one; return where they end."""
    if k > first and places[k - 1] == place:
        weights[k - 1] += weight
        return k
    if k > first + 1 and places[k - 2] == place:
        weights[k - 2] += weight
        return k
    places[k] = place
    weights[k] = weight
    return k + 1


def roi_align(
    length: Length,
    pixels: Input,
    output: Output,
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
    """The averages of a box."""
    average(
        pixels,
        output,
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


def roi_align_strided(
    length: Length,
    pixels: Input,
    output: Output,
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
    """Like :func:`roi_align`, for channels ``spacing`` elements apart."""
    average(
        pixels,
        output,
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


def average(
    pixels: Input,
    output: Output,
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
    """Each bin of a box, in blocks of four channels a lane, so that a tap is read once for four."""
    bins = y_bins * x_bins
    first = 0
    while first < channels:
        is_whole = first + 4 * lanes() <= channels
        p = 0
        while p < y_bins:
            y = p * y_room
            y_end = y + uniform(y_counts[p])
            q = 0
            while q < x_bins:
                x = q * x_room
                x_end = x + uniform(x_counts[q])
                c = first + lane()
                o = p * x_bins + q
                if is_whole:
                    t0, t1, t2, t3 = four_means(
                        pixels,
                        c * spacing,
                        lanes() * spacing,
                        y_places,
                        y_weights,
                        y,
                        y_end,
                        x_places,
                        x_weights,
                        x,
                        x_end,
                    )
                    output[c * bins + o] = t0
                    output[(c + lanes()) * bins + o] = t1
                    output[(c + 2 * lanes()) * bins + o] = t2
                    output[(c + 3 * lanes()) * bins + o] = t3
                else:
                    while c < channels:
                        output[c * bins + o] = mean(
                            pixels,
                            c * spacing,
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
                q += 1
            p += 1
        first += 4 * lanes()


def four_means(
    pixels: Input,
    i: int,
    step: int,
    y_places: Indices,
    y_weights: Values,
    y: int,
    y_end: int,
    x_places: Indices,
    x_weights: Values,
    x: int,
    x_end: int,
) -> tuple[float, float, float, float]:
    """The averages of one bin in four channels, ``step`` elements apart."""
    t0 = t1 = t2 = t3 = real(0)
    while y < y_end:
        r0 = r1 = r2 = r3 = real(0)
        k = x
        while k < x_end:
            a = uniform(y_places[y] + x_places[k]) + i
            v = x_weights[k]
            r0 = fma(v, pixels[a], r0)
            r1 = fma(v, pixels[a + step], r1)
            r2 = fma(v, pixels[a + 2 * step], r2)
            r3 = fma(v, pixels[a + 3 * step], r3)
            k += 1
        u = y_weights[y]
        t0 = fma(u, r0, t0)
        t1 = fma(u, r1, t1)
        t2 = fma(u, r2, t2)
        t3 = fma(u, r3, t3)
        y += 1
    return t0, t1, t2, t3


def mean(
    pixels: Input,
    i: int,
    y_places: Indices,
    y_weights: Values,
    y: int,
    y_end: int,
    x_places: Indices,
    x_weights: Values,
    x: int,
    x_end: int,
) -> float:
    """The average of one bin in one channel."""
    total = real(0)
    while y < y_end:
        of_row = real(0)
        k = x
        while k < x_end:
            a = uniform(y_places[y] + x_places[k]) + i
            of_row = fma(x_weights[k], pixels[a], of_row)
            k += 1
        total = fma(y_weights[y], of_row, total)
        y += 1
    return total
