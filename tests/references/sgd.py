r"""Stochastic gradient descent with momentum.

.. math::
    g_t &= \pm \nabla f(\theta_{t-1}) + \lambda\,\theta_{t-1} \\
    b_1 &= g_1, \qquad b_t = \mu\,b_{t-1} + (1-\tau)\,g_t \\
    \theta_t &= \theta_{t-1} - \gamma\,b_t \quad
        (\theta_{t-1} - \gamma\,(g_t + \mu\,b_t) \text{ with Nesterov})

Source: Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep
learning" (ICML 2013), with the learning rate outside of the velocity, as in torch.
"""

from __future__ import annotations

from torch import Tensor


def step(
    theta: Tensor,
    grad: Tensor,
    state: dict[str, Tensor],
    t: int,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Tensor:
    g = -grad if maximize else grad
    if weight_decay != 0:
        g = g + weight_decay * theta
    if momentum != 0:
        if "momentum_buffer" in state:
            state["momentum_buffer"] = momentum * state["momentum_buffer"] + (1 - dampening) * g
        else:
            state["momentum_buffer"] = g
        b = state["momentum_buffer"]
        g = g + momentum * b if nesterov else b
    return theta - lr * g
