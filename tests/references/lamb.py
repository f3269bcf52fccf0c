r"""Lamb, and an optimizer that runs it.

.. math::
    m_t &= \beta_1\,m_{t-1} + (1-\beta_1)\,g_t, \qquad
    v_t = \beta_2\,v_{t-1} + (1-\beta_2)\,g_t^2, \qquad g_t = \pm \nabla f(\theta_{t-1}) \\
    u_t &= \frac{m_t/(1-\beta_1^t)}{\sqrt{v_t/(1-\beta_2^t)} + \epsilon} + \lambda\,\theta_{t-1} \\
    r_t &= \lVert\theta_{t-1}\rVert / \lVert u_t\rVert \quad (1 \text{ if either norm is } 0) \\
    \theta_t &= \theta_{t-1} - \gamma\,r_t\,u_t

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes"
(2019), algorithm 2, with :math:`\phi` the identity, as in IPEX. The options are those of timm and
apex: without ``bias_correction``, :math:`m_t` and :math:`v_t` are not divided; without
``grad_averaging``, :math:`g_t` is added to :math:`m` whole; ``trust_clip`` lets :math:`r_t` be at
most 1; ``max_param_norm`` bounds :math:`\lVert\theta\rVert` in it, as torch_optimizer's
``clamp_value`` does; without ``always_adapt``, :math:`r_t` is 1 unless there is weight decay;
``decoupled_decay`` first replaces :math:`\theta_{t-1}` by :math:`(1-\gamma\lambda)\,\theta_{t-1}`
and adds nothing to :math:`u_t`.
"""

from __future__ import annotations

import inspect
from typing import Any

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
    bias_correction: bool = True,
    grad_averaging: bool = True,
    trust_clip: bool = False,
    max_param_norm: float | None = None,
    always_adapt: bool = True,
    decoupled_decay: bool = False,
    maximize: bool = False,
) -> Tensor:
    beta1, beta2 = betas
    beta3 = 1 - beta1 if grad_averaging else 1.0
    g = -grad if maximize else grad
    if decoupled_decay:
        theta = (1 - lr * weight_decay) * theta

    m = beta1 * state.get("exp_avg", 0.0) + beta3 * g
    v = beta2 * state.get("exp_avg_sq", 0.0) + (1 - beta2) * (g * g)
    state["exp_avg"], state["exp_avg_sq"] = m, v
    if bias_correction:
        m = m / (1 - beta1**t)
        v = v / (1 - beta2**t)
    u = m / (torch.sqrt(v) + eps)
    if weight_decay != 0 and not decoupled_decay:
        u = u + weight_decay * theta

    if not (always_adapt or weight_decay != 0):
        return theta - lr * u
    param_norm, update_norm = torch.linalg.vector_norm(theta), torch.linalg.vector_norm(u)
    if param_norm == 0 or update_norm == 0:
        return theta - lr * u
    if max_param_norm is not None:
        param_norm = torch.clamp(param_norm, max=max_param_norm)
    ratio: Tensor = param_norm / update_norm
    if trust_clip:
        ratio = torch.clamp(ratio, max=1.0)
    return theta - lr * ratio * u


HYPER_PARAMETERS = tuple(
    name
    for name, parameter in inspect.signature(step).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
)


class ReferenceLamb(torch.optim.Optimizer):
    """:func:`step` for each parameter; defaults and errors are those of IPEX's Lamb."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_clip: bool = False,
        max_param_norm: float | None = None,
        always_adapt: bool = True,
        decoupled_decay: bool = False,
        maximize: bool = False,
    ) -> None:
        values = locals()
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        if not lr >= 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        for i, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
        if not weight_decay >= 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        super().__init__(params, {name: values[name] for name in HYPER_PARAMETERS})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            options = {name: group[name] for name in HYPER_PARAMETERS}
            options["lr"] = float(options["lr"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                moments = {k: _as_real(v) for k, v in state.items() if k != "step"}
                t = int(state["step"])
                _as_real(p).copy_(step(_as_real(p), _as_real(p.grad), moments, t, **options))
                for key, value in moments.items():
                    state[key] = torch.view_as_complex(value) if p.is_complex() else value


def _as_real(tensor: Tensor) -> Tensor:
    """A complex tensor's real and imaginary parts, each of which has its own moments."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor
