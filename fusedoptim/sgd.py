r"""Stochastic gradient descent whose step is one kernel launch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.checks import describe
from fusedoptim.step.rule import Candidate, Numbers
from fusedoptim.step.scalars import number
from fusedoptim.step.tensors import Group, new_state

__all__ = ["FusedSGD"]


class FusedSGD(FusedOptimizer, torch.optim.SGD):
    r"""Drop-in for :class:`torch.optim.SGD` whose whole step is one kernel launch.

    .. math::
        g &\leftarrow \pm \nabla f(\theta) + \lambda\,\theta \\
        b &\leftarrow \mu\,b + (1-\tau)\,g \quad (b \leftarrow g \text{ at first}) \\
        \theta &\leftarrow \theta - \gamma\,b \quad
            (\theta - \gamma\,(g + \mu\,b) \text{ with Nesterov})

    Parameters may be float32, float64, bfloat16, float16 or complex, on the CPU or an Intel GPU,
    of any shape and strides. Arithmetic and momentum are float32 for the 16-bit dtypes, whose
    result is rounded once, to nearest even. A sparse gradient updates the rows that it touches;
    with momentum, as in torch, all rows that were ever touched.

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
        max_grad_norm: clip the gradients' norm, over all parameters, to this first, as
            :func:`torch.nn.utils.clip_grad_norm_` would. The gradients themselves stay unchanged.
        split: keep float32 values in two halves, as :class:`SplitSGD` does.

    Raises:
        ValueError: a hyper-parameter out of range.
        RuntimeError: ``foreach=True``, ``differentiable=True`` or ``fused=False``, each of which
            asks for another implementation.
        TypeError: with ``split``, a parameter is neither float32 nor bfloat16.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedSGD
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()

    Semantics, signature and state are those of torch 2.13's SGD; each class loads the other's
    state_dict. Source: Sutskever et al., "On the importance of initialization and momentum in deep
    learning" (2013), with torch's placement of the learning rate.
    """

    _sparse_state = ("momentum_buffer",)
    _saved_options = frozenset({"lr", "momentum", "dampening", "weight_decay"})
    _optional_state = frozenset({"momentum_buffer"})  # momentum may be switched on later

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
        max_grad_norm: float | None = None,
        split: bool = False,
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
            max_grad_norm=max_grad_norm,
            split=split,
        )

    def _kernels(self, group: Group, one_row: bool) -> tuple[str, ...]:
        return ("sgd_momentum",) if group["momentum"] != 0 else ("sgd",)

    def _numbers(self, group: Group) -> Numbers:
        return {
            "lr": number(group["lr"]),
            "weight_decay": number(group["weight_decay"]),
            "momentum": number(group["momentum"]),
            "one_minus_dampening": 1 - number(group["dampening"]),
            "nesterov": bool(group["nesterov"]),
        }

    def _initial_state(self, group: Group, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        if name == "momentum_buffer":  # the first step writes without reading it
            return new_state(target, dtype)
        return super()._initial_state(group, name, target, dtype)

    def _check_sparse(self, group: Group, candidate: Candidate) -> None:
        if group["weight_decay"] != 0:
            raise RuntimeError(
                f"{describe(type(self).__name__, candidate)} has a sparse gradient, to which "
                f"weight_decay={group['weight_decay']} cannot be added, as it moves every row; put "
                "the parameter into a group with weight_decay=0, or use sparse=False"
            )
