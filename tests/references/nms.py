"""Non-maximum suppression, box by box.

Source: torchvision's documentation of ``torchvision.ops.nms``: a box is dropped if its overlap with
a kept box of a higher score is larger than a threshold.
"""

from __future__ import annotations

from fractions import Fraction

from torch import Tensor


def nms(boxes: Tensor, scores: Tensor, threshold: Fraction) -> list[int]:
    """Return the exact indices of the kept boxes; of equal scores, the first box comes first."""
    corners = _scaled(boxes)
    values = scores.tolist()
    kept: list[int] = []
    for j in sorted(range(len(corners)), key=lambda j: -values[j]):
        if not any(_overlaps(corners[i], corners[j], threshold) for i in kept):
            kept.append(j)
    return kept


def _scaled(boxes: Tensor) -> list[list[int]]:
    """Scale the corners to integers by a power of two, which leaves the overlaps unchanged."""
    ratios = [[number.as_integer_ratio() for number in box] for box in boxes.tolist()]
    scale = max((divisor for box in ratios for _, divisor in box), default=1)
    return [[number * (scale // divisor) for number, divisor in box] for box in ratios]


def _overlaps(a: list[int], b: list[int], threshold: Fraction) -> bool:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    # shared / union > threshold, whatever the sign of the union; False if the union is zero
    return shared * union * threshold.denominator > threshold.numerator * union**2
