"""Whether all values of a tensor are finite, in one pass over them in most cases."""

from __future__ import annotations

from torch import Tensor


def is_finite(values: Tensor) -> bool:
    """Whether no value is infinite or NaN.

    Example:
        >>> import torch
        >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([0.0, -float("inf")]))
        (True, False)
    """
    # The sum is finite only if all values are, but may overflow; it is the faster test.
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
