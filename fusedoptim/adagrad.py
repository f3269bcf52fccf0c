r"""Adagrad whose step is one kernel launch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.rule import Candidate, Numbers
from fusedoptim.step.scalars import number
from fusedoptim.step.step_counts import Steps
from fusedoptim.step.tensors import Group, new_state

__all__ = ["FusedAdagrad"]


class FusedAdagrad(FusedOptimizer, torch.optim.Adagrad):
    r"""Drop-in for :class:`torch.optim.Adagrad` whose whole step is one kernel launch.

    .. math::
        g &\leftarrow \pm \nabla f(\theta) + \lambda\,\theta \\
        s &\leftarrow s + g^2 \\
        \theta &\leftarrow \theta - \frac{\gamma}{1 + (t-1)\,\eta}\,\frac{g}{\sqrt{s} + \epsilon}

    Parameters may be float32, float64, bfloat16, float16 or complex, on the CPU or an Intel GPU,
    of any shape and strides. Arithmetic and state are float32 for the 16-bit dtypes. A sparse
    gradient updates the rows that it touches.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of groups, as torch.optim takes them.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        lr_decay: :math:`\eta`.
        weight_decay: L2 penalty :math:`\lambda`; not allowed with sparse gradients.
        initial_accumulator_value: the first :math:`s`.
        eps: :math:`\epsilon`, which keeps the divisor from zero.
        foreach: None or False.
        maximize: ascend instead.
        differentiable: False.
        fused: None or True.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first, as
            :func:`torch.nn.utils.clip_grad_norm_` would. The gradients themselves stay unchanged.
        split: keep float32 values in two halves, as :class:`SplitSGD` does.

    Raises:
        ValueError: a hyper-parameter out of range.
        RuntimeError: an option that asks for another implementation.
        TypeError: with ``split``, a parameter is neither float32 nor bfloat16.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedAdagrad
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedAdagrad(model.parameters(), lr=0.01)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()

    Semantics, signature and state are those of torch 2.13's Adagrad; each class loads the other's
    state_dict. Source: Duchi et al., "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization" (2011).
    """

    _saved_options = frozenset(
        {"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"}
    )
    _saved_state = frozenset({"sum", "step"})

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        split: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
            foreach=foreach,
            maximize=maximize,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            split=split,
        )

    def _kernels(self, group: Group, one_row: bool) -> tuple[str, ...]:
        return ("adagrad",)

    def _numbers(self, group: Group) -> Numbers:
        return {name: number(group[name]) for name in ("lr", "lr_decay", "weight_decay", "eps")}

    def _row_numbers(self, group: Group, numbers: Numbers, steps: Steps) -> dict[str, Steps]:
        return {"step_size": numbers["lr"] / (1 + (steps - 1) * numbers["lr_decay"])}

    def _initial_state(self, group: Group, name: str, target: Tensor, dtype: torch.dtype) -> Tensor:
        if name == "sum":
            value = self.defaults["initial_accumulator_value"]
            return new_state(target, dtype).fill_(
                complex(value, value) if target.is_complex() else value
            )
        return super()._initial_state(group, name, target, dtype)

    def _check_sparse(self, group: Group, candidate: Candidate) -> None:
        if group["weight_decay"] != 0:
            raise RuntimeError("weight_decay option is not compatible with sparse gradients")
