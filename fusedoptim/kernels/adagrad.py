r"""Adagrad: each element's learning rate falls with the gradients that it has received.

.. math::
    g &\leftarrow c\,g_t + \lambda\,\theta \\
    s &\leftarrow s + g^2 \\
    \theta &\leftarrow \theta - \frac{\gamma}{1 + (t-1)\,\eta}\,\frac{g}{\sqrt{s} + \epsilon}

:math:`\lambda` is ``weight_decay`` and :math:`c` ``grad_factor``; the first fraction, in which
:math:`\eta` is the learning-rate decay, is ``step_size``. Semantics: ``torch.optim.Adagrad`` of
torch 2.13. Source: Duchi, Hazan, Singer, "Adaptive Subgradient Methods", JMLR 12 (2011).
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

__all__ = ["adagrad"]


def adagrad(
    i: Index,
    param: Param,
    grad: Grad,
    sum: State,  # noqa: A002 (what torch calls the state)
    step_size: RowScalar,
    grad_factor: DeviceScalar,
    weight_decay: Scalar,
    eps: Scalar,
) -> None:
    """Adagrad: reads three values and writes two for each parameter."""
    theta = param[i]
    g = grad_factor * grad[i]
    s = sum[i]
    if weight_decay != 0:
        g = fma(weight_decay, theta, g)
    s = fma(g, g, s)
    sum[i] = s
    param[i] = fma(-step_size, g / (math.sqrt(s) + eps), theta)
