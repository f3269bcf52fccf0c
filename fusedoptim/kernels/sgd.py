r"""Stochastic gradient descent, with and without momentum.

.. math::
    g &\leftarrow c\,g_t + \lambda\,\theta \\
    b &\leftarrow \mu\,b + (1-\tau)\,g \quad (b \leftarrow g \text{ at first}) \\
    \theta &\leftarrow \theta - \gamma\,b \quad
        (\theta - \gamma\,(g + \mu\,b) \text{ with Nesterov})

:math:`\gamma` is ``lr``, :math:`\lambda` ``weight_decay``, :math:`\mu` ``momentum``,
:math:`\tau` the dampening and :math:`c` ``grad_factor``. Semantics: ``torch.optim.SGD`` of
torch 2.13.
"""

from __future__ import annotations

from fusedoptim.kernels.language import (
    DeviceScalar,
    Flag,
    Grad,
    Index,
    Param,
    RowFlag,
    Scalar,
    State,
    fma,
)

__all__ = ["sgd", "sgd_momentum"]


def sgd(
    i: Index,
    param: Param,
    grad: Grad,
    grad_factor: DeviceScalar,
    lr: Scalar,
    weight_decay: Scalar,
) -> None:
    """Plain SGD: reads two values and writes one for each parameter."""
    theta = param[i]
    g = grad_factor * grad[i]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    param[i] = fma(-lr, g, theta)


def sgd_momentum(
    i: Index,
    param: Param,
    grad: Grad,
    momentum_buffer: State,
    fresh: RowFlag,
    grad_factor: DeviceScalar,
    lr: Scalar,
    weight_decay: Scalar,
    momentum: Scalar,
    one_minus_dampening: Scalar,
    nesterov: Flag,
) -> None:
    """SGD with momentum: reads three values and writes two for each parameter.

    ``one_minus_dampening`` is one minus the dampening. A ``fresh`` row's buffer holds nothing yet.
    """
    theta = param[i]
    g = grad_factor * grad[i]
    b = momentum_buffer[i]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    b = fma(momentum, b, one_minus_dampening * g)
    if fresh:
        b = g
    momentum_buffer[i] = b
    g = fma(momentum, b, g) if nesterov else b
    param[i] = fma(-lr, g, theta)
