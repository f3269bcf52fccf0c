r"""Lamb: Adam's update, scaled for each tensor by the ratio of two norms.

.. math::
    \theta &\leftarrow (1 - \gamma\,\lambda_{\text{decoupled}})\,\theta \\
    m &\leftarrow \beta_1\,m + \beta_3\,c\,g_t \\
    v &\leftarrow \beta_2\,v + (1-\beta_2)\,(c\,g_t)^2 \\
    u &\leftarrow \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon} + \lambda\,\theta \\
    r &\leftarrow \min(\lVert\theta\rVert, n) / \lVert u\rVert
        \quad (1 \text{ if either is } 0) \\
    \theta &\leftarrow \theta - \gamma\,r\,u

``average_correction`` is :math:`1/(1-\beta_1^t)` and ``root_correction``
:math:`1/\sqrt{1-\beta_2^t}`; both are 1 without bias correction. ``beta3`` is :math:`\beta_3`:
:math:`1-\beta_1`, or 1 without averaging of gradients. ``decay_factor`` is the first bracket,
:math:`c` ``grad_factor``, and :math:`n` ``max_param_norm``, which may be infinite.

The kernel ``lamb`` updates tensors of one row. Larger tensors take three kernels: the moments,
with the squares of :math:`\theta` and :math:`u` summed over each chunk; the ratio of each tensor;
and the update, which computes :math:`u` again from the moments, as keeping it would take memory.

Between the first and the last kernel of tensors that are divided among processes, these add up
their sums, which may fail. So the first, ``lamb_norms``, writes neither moments nor parameters, and
the last, ``lamb_step``, computes the moments again.

Semantics: IPEX's Lamb. Source: You et al., "Large Batch Optimization for Deep Learning" (2019),
with the upper of its bounds on the norm.
"""

from __future__ import annotations

import math

from fusedoptim.kernels.language import (
    ChunkSums,
    DeviceScalar,
    Flag,
    Grad,
    Index,
    Length,
    Param,
    Result,
    RowResult,
    RowScalar,
    Scalar,
    State,
    fma,
    group_sum,
    lane,
    lanes,
    real,
)
from fusedoptim.kernels.quarters import quarter_of

__all__ = ["lamb", "lamb_moments", "lamb_norms", "lamb_ratio", "lamb_step", "lamb_update"]


def moments(
    m: float,
    v: float,
    g: float,
    beta1: float,
    beta3: float,
    beta2: float,
    one_minus_beta2: float,
) -> tuple[float, float]:
    """Both moments after a gradient."""
    return fma(beta1, m, beta3 * g), fma(one_minus_beta2 * g, g, beta2 * v)


def direction(
    theta: float,
    m: float,
    v: float,
    average_correction: float,
    root_correction: float,
    weight_decay: float,
    eps: float,
) -> float:
    """The update of an element before it is scaled."""
    u = average_correction * m / fma(math.sqrt(v), root_correction, eps)
    decayed = fma(weight_decay, theta, u)
    if weight_decay != 0:  # a choice of two values, where a branch would make two loops
        u = decayed
    return u


def lamb_moments(
    i: Index,
    param: Param,
    grad: Grad,
    exp_avg: State,
    exp_avg_sq: State,
    average_correction: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    beta3: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> tuple[float, float]:
    """Update both moments; sum the squares of the parameter and of its update."""
    theta = decay_factor * param[i]
    g = grad_factor * grad[i]
    m, v = moments(exp_avg[i], exp_avg_sq[i], g, beta1, beta3, beta2, one_minus_beta2)
    exp_avg[i] = m
    exp_avg_sq[i] = v
    u = direction(theta, m, v, average_correction, root_correction, weight_decay, eps)
    return theta * theta, u * u


def lamb_norms(
    i: Index,
    param: Param,
    grad: Grad,
    exp_avg: State,
    exp_avg_sq: State,
    average_correction: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    beta3: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> tuple[float, float]:
    """Sum the squares of the parameter and of its update; write nothing."""
    theta = decay_factor * param[i]
    g = grad_factor * grad[i]
    m, v = moments(exp_avg[i], exp_avg_sq[i], g, beta1, beta3, beta2, one_minus_beta2)
    u = direction(theta, m, v, average_correction, root_correction, weight_decay, eps)
    return theta * theta, u * u


def lamb_ratio(
    length: Length,
    sums: ChunkSums,
    ratio: Result,
    max_param_norm: Scalar,
    adapt: Flag,
    clip: Flag,
) -> None:
    """One tensor's trust ratio: 1 unless ``adapt``, and at most 1 if ``clip``."""
    param_squares = update_squares = real(0)
    i = lane()
    while i < length:
        param_squares += sums[2 * i]
        update_squares += sums[2 * i + 1]
        i += lanes()
    r = trust_ratio(param_squares, update_squares, max_param_norm, adapt, clip)
    if lane() == 0:
        ratio[0] = r


def trust_ratio(
    param_squares: float, update_squares: float, max_param_norm: float, adapt: int, clip: int
) -> float:
    """The ratio of two norms, of whose squares each lane of the group has a part."""
    param_norm = math.sqrt(group_sum(param_squares))
    update_norm = math.sqrt(group_sum(update_squares))
    if param_norm > max_param_norm:
        param_norm = max_param_norm
    r = real(1)
    if adapt and param_norm != 0 and update_norm != 0:
        r = param_norm / update_norm
    if clip and r > 1:
        r = real(1)
    return r


def lamb_update(
    i: Index,
    param: Param,
    exp_avg: State,
    exp_avg_sq: State,
    ratio: RowResult,
    average_correction: RowScalar,
    root_correction: RowScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    lr: Scalar,
    eps: Scalar,
) -> None:
    """Step along the update, times the trust ratio."""
    theta = decay_factor * param[i]
    m, v = exp_avg[i], exp_avg_sq[i]
    u = direction(theta, m, v, average_correction, root_correction, weight_decay, eps)
    param[i] = fma(-lr * ratio, u, theta)


def lamb_step(
    i: Index,
    param: Param,
    grad: Grad,
    exp_avg: State,
    exp_avg_sq: State,
    ratio: RowResult,
    average_correction: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    beta3: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    lr: Scalar,
    eps: Scalar,
) -> None:
    """Update both moments; step along the update, times the trust ratio."""
    theta = decay_factor * param[i]
    g = grad_factor * grad[i]
    m, v = moments(exp_avg[i], exp_avg_sq[i], g, beta1, beta3, beta2, one_minus_beta2)
    exp_avg[i] = m
    exp_avg_sq[i] = v
    u = direction(theta, m, v, average_correction, root_correction, weight_decay, eps)
    param[i] = fma(-lr * ratio, u, theta)


def lamb(
    length: Length,
    param: Param,
    grad: Grad,
    exp_avg: State,
    exp_avg_sq: State,
    average_correction: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    beta3: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    lr: Scalar,
    eps: Scalar,
    max_param_norm: Scalar,
    adapt: Flag,
    clip: Flag,
) -> None:
    """Update a tensor of one row, which stays in the cache between the two passes."""
    corrections = average_correction, root_correction
    decay = decay_factor, weight_decay
    betas = beta1, beta3, beta2, one_minus_beta2
    moments = param, grad, exp_avg, exp_avg_sq, *corrections, grad_factor, *decay, *betas, eps
    param_squares = update_squares = real(0)
    whole = length - lanes()  # up to it every lane has an element, so loads need no mask
    quarter = quarter_of(length)  # the order of lamb_moments, so that the sums have the same bits
    start = 0
    while start < quarter:
        i = start
        while i < 4 * quarter:
            p2, u2 = lamb_moments(i + lane(), *moments)
            param_squares += p2
            update_squares += u2
            i += quarter
        start += lanes()
    start = 4 * quarter
    while start <= whole:
        p2, u2 = lamb_moments(start + lane(), *moments)
        param_squares += p2
        update_squares += u2
        start += lanes()
    if start + lane() < length:
        p2, u2 = lamb_moments(start + lane(), *moments)
        param_squares += p2
        update_squares += u2

    r = trust_ratio(param_squares, update_squares, max_param_norm, adapt, clip)
    update = param, exp_avg, exp_avg_sq, r, *corrections, *decay, lr, eps
    start = 0
    while start <= whole:
        lamb_update(start + lane(), *update)
        start += lanes()
    if start + lane() < length:
        lamb_update(start + lane(), *update)
