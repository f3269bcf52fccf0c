r"""Adagrad.

.. math::
    g_t &= \pm \nabla f(\theta_{t-1}) + \lambda\,\theta_{t-1} \\
    s_t &= s_{t-1} + g_t^2 \\
    \theta_t &= \theta_{t-1} - \frac{\gamma}{1 + (t-1)\,\eta}\,\frac{g_t}{\sqrt{s_t} + \epsilon}

Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
Optimization" (JMLR 12, 2011), the diagonal case; the decay :math:`\eta` and the first
:math:`s_0` are torch's.
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
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> Tensor:
    g = -grad if maximize else grad
    if weight_decay != 0:
        g = g + weight_decay * theta
    s = state.get("sum", initial_accumulator_value) + g * g
    state["sum"] = s
    return theta - lr / (1 + (t - 1) * lr_decay) * (g / (torch.sqrt(s) + eps))
