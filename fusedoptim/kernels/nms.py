r"""Non-maximum suppression: the boxes that do not overlap a kept box with a higher score.

.. math::
    \mathrm{kept}(j) \iff \nexists\, i < j:\ \mathrm{kept}(i) \land
        \frac{|b_i \cap b_j|}{|b_i| + |b_j| - |b_i \cap b_j|} > t

A group walks the boxes in tiles of one box a lane. It compares a tile with all boxes kept so far,
then the tile's boxes with each other: a bit of a lane's **rivals** is an earlier box of the tile
that overlaps the lane's. Then it decides for one box after the other.

Semantics: ``torchvision.ops.nms`` of torchvision 0.28, whose arithmetic this is, operation by
operation.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    Indices,
    Length,
    RowInteger,
    Scalar,
    Values,
    barrier,
    lane,
    lanes,
    real,
    uniform,
)

__all__ = ["nms"]

_MOST = 32
"""The most boxes of a tile, each of which has a bit of an integer."""


def nms(
    length: Length,
    size: RowInteger,
    boxes: Values,
    best: Values,
    rivals: Indices,
    kept: Indices,
    count: Indices,
    threshold: Scalar,
) -> None:
    """The indices of the boxes that are kept.

    Args:
        length: the row's length, in elements of work; not read.
        size: the number of boxes.
        boxes: five numbers for each box: left, top, right, bottom and area.
        best: the boxes that are kept; it has room for all boxes.
        rivals: working memory, a number for each box of a tile.
        kept: the indices of the kept boxes, in their order.
        count: the number of kept boxes.
        threshold: the least overlap that suppresses.
    """
    tile = lanes() if lanes() < _MOST else _MOST
    found = 0
    first = 0
    while first < size:
        j = first + lane()
        is_box = lane() < tile and j < size
        b = 5 * (j if is_box else first)
        left, top, right, bottom = boxes[b], boxes[b + 1], boxes[b + 2], boxes[b + 3]
        area = boxes[b + 4]
        is_alive = 1 if is_box else 0
        k = 0
        while k < found:
            if overlap(best, 5 * k, left, top, right, bottom, area) >= threshold:
                is_alive = 0
            k += 1
        bits = 0
        i = 0
        while i < tile and first + i < size:
            if overlap(boxes, 5 * (first + i), left, top, right, bottom, area) >= threshold:
                bits |= 1 << i
            i += 1
        if is_box:
            rivals[lane()] = bits if is_alive else -1
        barrier()
        won = 0
        i = 0
        while i < tile and first + i < size:
            bits = uniform(rivals[i])
            if bits >= 0 and bits & won == 0:
                won |= 1 << i
                if lane() == 0:
                    kept[found] = first + i
                    b = 0
                    while b < 5:
                        best[5 * found + b] = boxes[5 * (first + i) + b]
                        b += 1
                found += 1
            i += 1
        barrier()
        first += tile
    if lane() == 0:
        count[0] = found


def overlap(
    boxes: Values, b: int, left: float, top: float, right: float, bottom: float, area: float
) -> float:
    """The intersection of a box with another over their union."""
    width = smaller(boxes[b + 2], right) - larger(boxes[b], left)
    height = smaller(boxes[b + 3], bottom) - larger(boxes[b + 1], top)
    shared = larger(real(0), width) * larger(real(0), height)
    return shared / (boxes[b + 4] + area - shared)


def larger(x: float, y: float) -> float:
    """The larger number, or the first if either is NaN."""
    return y if x < y else x


def smaller(x: float, y: float) -> float:
    """The smaller number, or the first if either is NaN."""
    return y if y < x else x
