r"""Cross-entropy of a row of logits and the index of its class.

.. math::
    s &= \max_j x_j + \log \sum_j e^{x_j - \max_k x_k} \\
    \ell &= (1-\epsilon)\,(s - x_t) + \epsilon\,\Big(s - \frac{1}{n} \sum_j x_j\Big) \\
    \frac{\partial \ell}{\partial x_j} &= e^{x_j - s} - (1-\epsilon)\,[j = t] - \frac{\epsilon}{n}

:math:`t` is ``target``, :math:`n` the row's ``length``, :math:`\epsilon` ``smoothing`` and
:math:`s` ``log_sum``. The probabilities are never stored: the backward pass computes them again
from :math:`s`. A row whose target is ``ignore_index`` has no loss; if the target is not a class,
the loss is NaN.

Semantics: ``torch.nn.functional.cross_entropy`` of torch 2.13. Source of the smoothing: Szegedy et
al., "Rethinking the Inception Architecture for Computer Vision" (2015).
"""

from __future__ import annotations

import math

from fusedoptim.kernels.language import (
    Input,
    Integer,
    Length,
    Output,
    Result,
    RowInt,
    RowResult,
    Scalar,
    group_max,
    group_sum,
    lane,
    lanes,
    real,
)

__all__ = ["cross_entropy", "cross_entropy_backward"]


def cross_entropy(
    length: Length,
    logits: Input,
    target: RowInt,
    loss: Result,
    log_sum: Result,
    smoothing: Scalar,
    ignore_index: Integer,
) -> None:
    """The loss of a row, read twice while it is in the cache."""
    largest = real(-math.inf)
    whole = length - lanes()  # up to it every lane has an element, so loads need no mask
    start = 0
    while start <= whole:
        largest = larger(logits[start + lane()], largest)
        start += lanes()
    if start + lane() < length:
        largest = larger(logits[start + lane()], largest)
    largest = group_max(largest)

    total = distances = real(0)  # distances from the largest, so an offset of all costs no bits
    start = 0
    while start <= whole:
        x = logits[start + lane()] - largest
        total += math.exp(x)
        distances += x
        start += lanes()
    if start + lane() < length:
        x = logits[start + lane()] - largest
        total += math.exp(x)
        distances += x
    log_total = math.log(group_sum(total))
    distances = group_sum(distances)

    if lane() == 0:
        log_sum[0] = largest + log_total
        if target == ignore_index:
            loss[0] = real(0)
        elif target < 0 or target >= length:
            loss[0] = real(math.nan)
        else:
            value = largest - logits[target] + log_total
            if smoothing != 0:
                uniform = log_total - distances / real(length)
                value = (real(1) - smoothing) * value + smoothing * uniform
            loss[0] = value


def larger(x: float, y: float) -> float:
    """The larger of two numbers."""
    return x if x > y else y


def cross_entropy_backward(
    length: Length,
    logits: Input,
    grad_logits: Output,
    target: RowInt,
    log_sum: RowResult,
    grad_loss: RowResult,
    smoothing: Scalar,
    ignore_index: Integer,
) -> None:
    """The gradient of a row's logits: reads them and writes as much."""
    factor = real(0) if target == ignore_index else grad_loss
    uniform = smoothing / real(length)
    whole = length - lanes()
    start = 0
    while start <= whole:
        i = start + lane()
        grad_logits[i] = factor * (math.exp(logits[i] - log_sum) - uniform)
        start += lanes()
    i = start + lane()
    if i < length:
        grad_logits[i] = factor * (math.exp(logits[i] - log_sum) - uniform)
    # The lane that has written the class's element writes it again.
    if target >= 0 and target < length and lane() == target % lanes():
        of_class = math.exp(logits[target] - log_sum) - uniform - (real(1) - smoothing)
        grad_logits[target] = factor * of_class
