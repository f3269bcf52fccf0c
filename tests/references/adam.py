r"""Adam, AdamW and AMSGrad.

.. math::
    g_t &= \pm \nabla f(\theta_{t-1}) + \lambda\,\theta_{t-1} \quad
        (\text{AdamW: no } \lambda; \; \theta_{t-1} \leftarrow (1-\gamma\lambda)\,\theta_{t-1}) \\
    m_t &= \beta_1\,m_{t-1} + (1-\beta_1)\,g_t \\
    v_t &= \beta_2\,v_{t-1} + (1-\beta_2)\,g_t^2 \qquad
        (\text{AMSGrad: from here on } \max_{s \le t} v_s) \\
    \hat m_t &= m_t / (1-\beta_1^t), \qquad \hat v_t = v_t / (1-\beta_2^t) \\
    \theta_t &= \theta_{t-1} - \gamma\,\frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon}

Sources: Kingma, Ba, "Adam: A Method for Stochastic Optimization" (2014), algorithm 1; Loshchilov,
Hutter, "Decoupled Weight Decay Regularization" (2017), algorithm 2; Reddi, Kale, Kumar, "On the
Convergence of Adam and Beyond" (2018), algorithm 2, with Adam's bias corrections, as in torch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def step(
    theta: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    t: int,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> Tensor:
    beta1, beta2 = betas
    g = -grad if maximize else grad
    if weight_decay != 0:
        if decoupled_weight_decay:
            theta = (1 - lr * weight_decay) * theta
        else:
            g = g + weight_decay * theta
    m = beta1 * state.get("exp_avg", 0.0) + (1 - beta1) * g
    v = beta2 * state.get("exp_avg_sq", 0.0) + (1 - beta2) * (g * g)
    state["exp_avg"], state["exp_avg_sq"] = m, v
    if amsgrad:
        v = torch.maximum(state.get("max_exp_avg_sq", v), v)
        state["max_exp_avg_sq"] = v
    m_hat = m / (1 - beta1**t)
    v_hat = v / (1 - beta2**t)
    return theta - lr * (m_hat / (torch.sqrt(v_hat) + eps))
