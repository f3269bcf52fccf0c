r"""Adam and AdamW, with and without AMSGrad.

.. math::
    \theta &\leftarrow (1 - \gamma\,\lambda_{\text{decoupled}})\,\theta \\
    g &\leftarrow c\,g_t + \lambda\,\theta \\
    m &\leftarrow m + (1-\beta_1)\,(g - m) \quad
        (g + \beta_1\,(m - g) \text{ if } \beta_1 \le 1/2) \\
    v &\leftarrow \beta_2\,v + (1-\beta_2)\,g^2 \qquad
        (\hat v \leftarrow \max(\hat v, v) \text{ with AMSGrad, else } \hat v = v) \\
    \theta &\leftarrow \theta - \frac{\gamma}{1-\beta_1^t}\,
        \frac{m}{\sqrt{\hat v}\,/\sqrt{1-\beta_2^t} + \epsilon}

``decay_factor`` is the first bracket, ``step_size`` the fraction :math:`\gamma / (1-\beta_1^t)`,
``root_correction`` :math:`1/\sqrt{1-\beta_2^t}` and :math:`c` ``grad_factor``. Semantics:
``torch.optim.Adam`` and ``AdamW`` of torch 2.13. Sources: Kingma, Ba, "Adam" (2014); Reddi, Kale,
Kumar, "On the Convergence of Adam and Beyond" (2018); Loshchilov, Hutter, "Decoupled Weight Decay
Regularization" (2017).
"""

from __future__ import annotations

import math
from typing import Any

from fusedoptim.kernels.language import (
    BlockScales,
    DeviceScalar,
    Grad,
    Index,
    Length,
    Param,
    ParamNumber,
    Position,
    RowScalar,
    Scalar,
    State,
    StateBf16,
    StateE4M3,
    StateE5M3,
    fetch,
    fma,
    lane,
    lane_values,
    lanes,
    real,
)
from fusedoptim.kernels.rounding import (
    BLOCK,
    e4m3_code,
    e4m3_product,
    e4m3_scale,
    e5m3_code,
    e5m3_product,
    e5m3_scale,
    for_each_element,
    is_scalable,
    larger_magnitude,
    to_bf16,
)

__all__ = ["adam", "adam_amsgrad", "adam_bfloat16", "adam_float8"]


def adam(
    i: Index,
    param: Param,
    grad: Grad,
    exp_avg: State,
    exp_avg_sq: State,
    step_size: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    one_minus_beta1: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> None:
    """Adam: reads four values and writes three for each parameter.

    As torch's ``lerp``, the average starts from whichever of ``m`` and ``g`` has the larger weight:
    after a spike, ``m + (g - m)`` would lose ``g``.
    """
    theta = decay_factor * param[i]
    g = grad_factor * grad[i]
    m = exp_avg[i]
    v = exp_avg_sq[i]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    m = fma(one_minus_beta1, g - m, m) if one_minus_beta1 < beta1 else fma(beta1, m - g, g)
    v = fma(one_minus_beta2 * g, g, beta2 * v)
    exp_avg[i] = m
    exp_avg_sq[i] = v
    param[i] = fma(-step_size, m / fma(math.sqrt(v), root_correction, eps), theta)


def adam_amsgrad(
    i: Index,
    param: Param,
    grad: Grad,
    exp_avg: State,
    exp_avg_sq: State,
    max_exp_avg_sq: State,
    step_size: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    one_minus_beta1: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> None:
    """Adam that divides by the largest second moment so far: reads five values and writes four."""
    theta = decay_factor * param[i]
    g = grad_factor * grad[i]
    m = exp_avg[i]
    v = exp_avg_sq[i]
    v_max = max_exp_avg_sq[i]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    m = fma(one_minus_beta1, g - m, m) if one_minus_beta1 < beta1 else fma(beta1, m - g, g)
    v = fma(one_minus_beta2 * g, g, beta2 * v)
    if not v <= v_max:  # NaN too, as torch.maximum has it
        v_max = v
    exp_avg[i] = m
    exp_avg_sq[i] = v
    max_exp_avg_sq[i] = v_max
    param[i] = fma(-step_size, m / fma(math.sqrt(v_max), root_correction, eps), theta)


def adam_bfloat16(
    length: Length,
    param: Param,
    grad: Grad,
    exp_avg: StateBf16,
    exp_avg_sq: StateBf16,
    position: Position,
    number: ParamNumber,
    step: RowScalar,
    step_size: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    one_minus_beta1: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> None:
    """Adam whose moments are bfloat16, rounded stochastically."""
    gradient = param, grad, grad_factor, decay_factor, weight_decay
    numbers = beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, root_correction
    update = exp_avg, exp_avg_sq, gradient, numbers
    for_each_element(update_bfloat16, update, 0, length, position, number, step, None)


def update_bfloat16(
    i: int, k: int, word: int, exp_avg: Any, exp_avg_sq: Any, gradient: Any, numbers: Any
) -> None:
    """Update one element, the lane's ``k``-th; ``word`` rounds its moments."""
    theta, g = penalized(i, *gradient)
    m, v = moments(g, numbers[0] * exp_avg[i], numbers[2] * exp_avg_sq[i], *numbers)
    exp_avg[i] = to_bf16(m, word)
    exp_avg_sq[i] = to_bf16(v, word)
    gradient[0][i] = updated(theta, m, v, *numbers)


def adam_float8(
    length: Length,
    param: Param,
    grad: Grad,
    exp_avg: StateE4M3,
    exp_avg_sq: StateE5M3,
    exp_avg_scale: BlockScales,
    exp_avg_sq_scale: BlockScales,
    position: Position,
    number: ParamNumber,
    step: RowScalar,
    step_size: RowScalar,
    root_correction: RowScalar,
    grad_factor: DeviceScalar,
    decay_factor: Scalar,
    weight_decay: Scalar,
    beta1: Scalar,
    one_minus_beta1: Scalar,
    beta2: Scalar,
    one_minus_beta2: Scalar,
    eps: Scalar,
) -> None:
    """Adam whose moments are 8-bit numbers, with a scale for each block of elements.

    A block is BLOCK elements of one lane, so lanes need nothing of each other. A first pass over it
    averages the moments, and the lane keeps them: the largest decide the scales, with which a
    second pass rounds them.
    """
    gradient = param, grad, grad_factor, decay_factor, weight_decay
    numbers = beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, root_correction
    kept = lane_values(BLOCK), lane_values(BLOCK)
    first = 0
    while first < length:
        end = min(first + BLOCK * lanes(), length)
        block = first // BLOCK + lane()
        state = exp_avg, exp_avg_sq, exp_avg_scale[block], exp_avg_sq_scale[block]
        average = kept, state, gradient, numbers

        m = v = real(0)
        start, k = first, 0
        while start + lanes() <= end:
            m, v = larger_moments(start + lane(), k, m, v, *average)
            start += lanes()
            k += 1
        if start + lane() < end:
            m, v = larger_moments(start + lane(), k, m, v, *average)
        if not is_scalable(m, v):
            m, v = largest_scalable(first, end, *kept)
        scale, scale_sq = e4m3_scale(m), e5m3_scale(v)

        exp_avg_scale[block] = scale
        exp_avg_sq_scale[block] = scale_sq
        update = kept, exp_avg, exp_avg_sq, scale, scale_sq, gradient, numbers
        for_each_element(
            update_float8, update, first, end, position, number, step, fetch_next_block
        )
        first += BLOCK * lanes()


def larger_moments(
    i: int, k: int, m: float, v: float, kept: Any, state: Any, gradient: Any, numbers: Any
) -> Any:
    """Keep the new moments of element ``i``, the lane's ``k``-th.

    Returns:
        the larger magnitude of ``m`` and the first moment, and of ``v`` and the second.
    """
    exp_avg, exp_avg_sq, scale, scale_sq = state
    _, g = penalized(i, *gradient)
    old = (
        e4m3_product(exp_avg[i], scale, numbers[0]),
        e5m3_product(exp_avg_sq[i], scale_sq, numbers[2]),
    )
    new_m, new_v = moments(g, *old, *numbers)
    kept[0][k] = new_m
    kept[1][k] = new_v
    return larger_magnitude(m, new_m), larger_magnitude(v, new_v)


def largest_scalable(start: int, end: int, kept_m: Any, kept_v: Any) -> Any:
    """The largest magnitudes of a lane's kept moments, excluding values too large for a scale."""
    m = v = real(0)
    k = 0
    while start < end:
        if start + lane() < end and is_scalable(kept_m[k], kept_v[k]):
            m, v = larger_magnitude(m, kept_m[k]), larger_magnitude(v, kept_v[k])
        start += lanes()
        k += 1
    return m, v


def update_float8(
    i: int,
    k: int,
    word: int,
    kept: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    scale: float,
    scale_sq: float,
    gradient: Any,
    numbers: Any,
) -> None:
    """Update one element, the lane's ``k``-th; ``word`` rounds its moments.

    Where the second moment has been rounded to zero and the first has not, the root would be zero:
    it is at least that of the smallest number of the block.
    """
    m, v = kept[0][k], kept[1][k]
    exp_avg[i] = e4m3_code(m, scale, word)
    exp_avg_sq[i] = e5m3_code(v, scale_sq, word)
    smallest = real(0.125) * scale_sq
    if v < smallest:
        v = smallest
    theta, _ = penalized(i, *gradient)
    gradient[0][i] = updated(theta, m, v, *numbers)


def fetch_next_block(
    start: int,
    kept: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    scale: float,
    scale_sq: float,
    gradient: Any,
    numbers: Any,
) -> None:
    """Prefetch the elements of the next block that correspond to those from ``start`` on.

    Otherwise its first pass would wait for them, while memory is idle now.
    """
    place = start + BLOCK * lanes()
    fetch(gradient[0], place, 64)
    fetch(gradient[1], place, 64)
    fetch(exp_avg, place, 64)
    fetch(exp_avg_sq, place, 64)


def penalized(
    i: int, param: Any, grad: Any, grad_factor: float, decay_factor: float, weight_decay: float
) -> Any:
    """The decayed parameter, and its gradient with the penalty."""
    theta = decay_factor * param[i]
    g = grad_factor * grad[i]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    return theta, g


def moments(
    g: float,
    m: float,
    v: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    eps: float,
    step_size: float,
    root_correction: float,
) -> Any:
    """Both moments: ``m`` and ``v``, multiplied by their betas before, with ``g`` averaged in."""
    return fma(one_minus_beta1, g, m), fma(one_minus_beta2 * g, g, v)


def updated(
    theta: float,
    m: float,
    v: float,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    eps: float,
    step_size: float,
    root_correction: float,
) -> float:
    """The parameter after the step."""
    return fma(-step_size, m / fma(math.sqrt(v), root_correction, eps), theta)
