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

from fusedoptim.kernels.language import (
    DeviceScalar,
    Grad,
    Index,
    Param,
    RowScalar,
    Scalar,
    State,
    fma,
)

__all__ = ["adam", "adam_amsgrad"]


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
    """Adam that divides by the largest second moment met: reads five values and writes four."""
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
