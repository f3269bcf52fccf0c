r"""Adam and AdamW whose step is one kernel launch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.rule import Candidate, Numbers
from fusedoptim.step.scalars import number
from fusedoptim.step.step_counts import Steps
from fusedoptim.step.tensors import Group

__all__ = ["FusedAdam", "FusedAdamW"]


class _Adam(FusedOptimizer):
    """What Adam and AdamW ask of their kernel; a group says which of the two it is."""

    _optional_state = frozenset({"max_exp_avg_sq"})  # amsgrad may be switched on later

    def _kernels(self, group: Group, one_row: bool) -> tuple[str, ...]:
        return ("adam_amsgrad",) if group["amsgrad"] else ("adam",)

    def _numbers(self, group: Group) -> Numbers:
        beta1, beta2 = map(number, group["betas"])
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        decoupled = group["decoupled_weight_decay"]
        return {
            "lr": lr,
            "decay_factor": 1 - lr * decay if decoupled else 1.0,
            "weight_decay": 0.0 if decoupled else decay,
            "beta1": beta1,
            "one_minus_beta1": 1 - beta1,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "eps": number(group["eps"]),
        }

    def _row_numbers(self, group: Group, numbers: Numbers, steps: Steps) -> dict[str, Steps]:
        return {
            "step_size": numbers["lr"] / (1 - numbers["beta1"] ** steps),
            "root_correction": (1 - numbers["beta2"] ** steps) ** -0.5,
        }

    def _check_sparse(self, group: Group, candidate: Candidate) -> None:
        raise RuntimeError(
            "Adam does not support sparse gradients, please consider SparseAdam instead"
        )


class FusedAdam(_Adam, torch.optim.Adam):
    r"""Drop-in for :class:`torch.optim.Adam` whose whole step is one kernel launch.

    .. math::
        g &\leftarrow \pm \nabla f(\theta) + \lambda\,\theta \\
        m &\leftarrow \beta_1\,m + (1-\beta_1)\,g \\
        v &\leftarrow \beta_2\,v + (1-\beta_2)\,g^2 \\
        \theta &\leftarrow \theta - \gamma\,
            \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    Parameters may be float32, float64, bfloat16, float16 or complex, on the CPU or an Intel GPU,
    of any shape and strides. Arithmetic and state are float32 for the 16-bit dtypes.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of groups, as torch.optim takes them.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        betas: :math:`\beta_1` and :math:`\beta_2`, numbers or one-element tensors.
        eps: :math:`\epsilon`, which keeps the divisor from zero.
        weight_decay: L2 penalty :math:`\lambda`.
        amsgrad: divide by the largest :math:`v` met.
        foreach: None or False.
        maximize: ascend instead.
        capturable: False.
        differentiable: False.
        fused: None or True.
        decoupled_weight_decay: shrink :math:`\theta` by :math:`1-\gamma\lambda` instead of the
            penalty, as AdamW does.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first, as
            :func:`torch.nn.utils.clip_grad_norm_` would; the gradients themselves stay.
        split: keep float32 values in two halves, as :class:`SplitSGD` does.

    Raises:
        ValueError: a hyper-parameter out of range.
        RuntimeError: an option that asks for another implementation.
        TypeError: with ``split``, a parameter is neither float32 nor bfloat16.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedAdam
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedAdam(model.parameters(), lr=0.001)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()

    Semantics, signature and state are those of torch 2.13's Adam; a state_dict moves both ways.
    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization" (2015); ``amsgrad``: Reddi
    et al., "On the Convergence of Adam and Beyond" (2018).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_grad_norm: float | None = None,
        split: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=decoupled_weight_decay,
            max_grad_norm=max_grad_norm,
            split=split,
        )


class FusedAdamW(_Adam, torch.optim.AdamW):
    r"""Drop-in for :class:`torch.optim.AdamW` whose whole step is one kernel launch.

    .. math::
        \theta &\leftarrow (1 - \gamma\,\lambda)\,\theta \\
        m &\leftarrow \beta_1\,m + (1-\beta_1)\,g \\
        v &\leftarrow \beta_2\,v + (1-\beta_2)\,g^2 \\
        \theta &\leftarrow \theta - \gamma\,
            \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon}

    where :math:`g = \pm \nabla f(\theta)`. Parameters may be float32, float64, bfloat16, float16
    or complex, on the CPU or an Intel GPU, of any shape and strides. Arithmetic and state are
    float32 for the 16-bit dtypes.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of groups, as torch.optim takes them.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        betas: :math:`\beta_1` and :math:`\beta_2`, numbers or one-element tensors.
        eps: :math:`\epsilon`, which keeps the divisor from zero.
        weight_decay: decoupled decay :math:`\lambda`.
        amsgrad: divide by the largest :math:`v` met.
        maximize: ascend instead.
        foreach: None or False.
        capturable: False.
        differentiable: False.
        fused: None or True.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first, as
            :func:`torch.nn.utils.clip_grad_norm_` would; the gradients themselves stay.
        split: keep float32 values in two halves, as :class:`SplitSGD` does.

    Raises:
        ValueError: a hyper-parameter out of range.
        RuntimeError: an option that asks for another implementation.
        TypeError: with ``split``, a parameter is neither float32 nor bfloat16.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedAdamW
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedAdamW(model.parameters(), lr=0.001)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()

    Semantics, signature and state are those of torch 2.13's AdamW; a state_dict moves both ways.
    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019).
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        split: bool = False,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            max_grad_norm=max_grad_norm,
            split=split,
        )
