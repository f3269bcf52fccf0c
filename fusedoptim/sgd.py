r"""Stochastic gradient descent whose step is one kernel launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd as torch_sgd

from fusedoptim._optimizer import FusedOptimizer, Group

__all__ = ["FusedSGD"]


def _number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else value


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    r"""Drop-in for :class:`torch.optim.SGD` whose whole step is one kernel launch.

    .. math::
        g &\leftarrow \pm \nabla f(\theta) + \lambda\,\theta \\
        b &\leftarrow \mu\,b + (1-\tau)\,g \quad (b \leftarrow g \text{ at first}) \\
        \theta &\leftarrow \theta - \gamma\,b \quad
            (\theta - \gamma\,(g + \mu\,b) \text{ with Nesterov})

    Parameters may be float32, float64, bfloat16, float16 or complex, on the CPU or an Intel GPU,
    of any shape and strides. Arithmetic and momentum are float32 for the 16-bit dtypes, whose
    result is rounded once, to nearest even. A sparse gradient is applied by torch's own update.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of groups, as torch.optim takes them.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        momentum: factor :math:`\mu`; 0 keeps no momentum buffer.
        dampening: :math:`\tau`; from a parameter's second step on.
        weight_decay: L2 penalty :math:`\lambda`.
        nesterov: Nesterov momentum; needs a momentum and no dampening.
        maximize: ascend instead.
        foreach: None or False.
        differentiable: False.
        fused: None or True.

    Raises:
        ValueError: a hyper-parameter out of range.
        RuntimeError: ``foreach=True``, ``differentiable=True`` or ``fused=False``, each of which
            asks for another implementation.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedSGD
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    Semantics, signature and state are those of torch 2.13's SGD; a state_dict moves both ways.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

    def _kernel(self, group: Group) -> str:
        return "sgd_momentum" if group["momentum"] != 0 else "sgd"

    def _scalars(self, group: Group) -> dict[str, float]:
        return {
            "lr": _number(group["lr"]),
            "weight_decay": _number(group["weight_decay"]),
            "momentum": _number(group["momentum"]),
            "undampened": 1 - _number(group["dampening"]),
            "nesterov": group["nesterov"],
            "maximize": group["maximize"],
        }

    def _update_apart(self, group: Group, params: list[Tensor]) -> None:
        has_momentum = group["momentum"] != 0
        states = [self.state[p] if has_momentum else {} for p in params]
        buffers = [state.get("momentum_buffer") for state in states]
        torch_sgd(
            params,
            [p.grad for p in params if p.grad is not None],
            buffers,
            has_sparse_grad=True,
            foreach=False,
            fused=False,
            weight_decay=_number(group["weight_decay"]),
            momentum=group["momentum"],
            lr=_number(group["lr"]),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if has_momentum:
            for state, buffer in zip(states, buffers):
                state["momentum_buffer"] = buffer
