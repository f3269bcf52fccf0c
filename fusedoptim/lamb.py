r"""Lamb: Adam's update, scaled for each tensor by the ratio of two norms."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.rule import Candidate, Numbers
from fusedoptim.step.scalars import number
from fusedoptim.step.step_counts import Steps
from fusedoptim.step.tensors import Group

__all__ = ["FusedLamb"]


class FusedLamb(FusedOptimizer):
    r"""Lamb, for large batches, whose step stays on the device: no norm comes back to the host.

    .. math::
        m &\leftarrow \beta_1\,m + (1-\beta_1)\,g \\
        v &\leftarrow \beta_2\,v + (1-\beta_2)\,g^2 \\
        u &\leftarrow \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \epsilon} + \lambda\,\theta \\
        \theta &\leftarrow \theta - \gamma\,\frac{\lVert\theta\rVert}{\lVert u\rVert}\,u
            \quad (\text{the ratio is } 1 \text{ if either norm is } 0)

    where :math:`g = \pm \nabla f(\theta)` and a norm is over one parameter tensor. Parameters may
    be float32, float64, bfloat16, float16 or complex, on the CPU or an Intel GPU, of any shape and
    strides. Arithmetic and state are float32 for the 16-bit dtypes.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of groups, as torch.optim takes them.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        betas: :math:`\beta_1` and :math:`\beta_2`.
        eps: :math:`\epsilon`, which keeps the divisor from zero.
        weight_decay: :math:`\lambda`.
        bias_correction: divide :math:`m` and :math:`v` by :math:`1-\beta^t`.
        grad_averaging: False adds :math:`g` itself to :math:`m`, instead of
            :math:`(1-\beta_1)\,g`.
        trust_clip: limit the ratio to at most 1.
        max_param_norm: an upper bound for :math:`\lVert\theta\rVert` in the ratio; None for no
            bound.
        always_adapt: False uses the ratio only in groups with weight decay, as timm does.
        decoupled_decay: multiply :math:`\theta` by :math:`1-\gamma\lambda` first, instead of
            adding :math:`\lambda\,\theta` to :math:`u`.
        maximize: ascend instead.
        foreach: None or False.
        capturable: False.
        differentiable: False.
        fused: None or True.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first, as
            :func:`torch.nn.utils.clip_grad_norm_` would. The gradients themselves stay unchanged.
        split: keep float32 values in two halves, as :class:`SplitSGD` does.

    Raises:
        ValueError: a hyper-parameter out of range.
        RuntimeError: an option that asks for another implementation, or, in a step, a sparse
            gradient.
        TypeError: with ``split``, a parameter is neither float32 nor bfloat16.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedLamb
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = FusedLamb(model.parameters(), lr=0.01, weight_decay=0.01)
        >>> model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()

    Semantics are those of IPEX's Lamb; the options are those of timm, apex and torch_optimizer
    (``clamp_value`` is ``max_param_norm`` there). Source: You et al.,
    "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019).
    """

    _saved_options = frozenset({"lr", "betas", "eps", "weight_decay"})
    _saved_state = frozenset({"exp_avg", "exp_avg_sq", "step"})

    def __init__(
        self,
        params: ParamsT,
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
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        split: bool = False,
    ) -> None:
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
        if max_param_norm is not None and not max_param_norm > 0:
            raise ValueError(f"Invalid max_param_norm value: {max_param_norm}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "grad_averaging": grad_averaging,
            "trust_clip": trust_clip,
            "max_param_norm": max_param_norm,
            "always_adapt": always_adapt,
            "decoupled_decay": decoupled_decay,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
        }
        super().__init__(params, defaults, max_grad_norm=max_grad_norm, split=split)

    def _kernels(self, group: Group, one_row: bool) -> tuple[str, ...]:
        return ("lamb",) if one_row else ("lamb_moments", "lamb_ratio", "lamb_update")

    def _sharded_kernels(self, group: Group) -> tuple[str, ...]:
        return "lamb_norms", "lamb_ratio", "lamb_step"

    def _numbers(self, group: Group) -> Numbers:
        lr, decay = number(group["lr"]), number(group["weight_decay"])
        beta1, beta2 = map(number, group["betas"])
        decoupled = group["decoupled_decay"]
        most = group["max_param_norm"]
        return {
            "lr": lr,
            "decay_factor": 1 - lr * decay if decoupled else 1.0,
            "weight_decay": 0.0 if decoupled else decay,
            "beta1": beta1,
            "beta3": 1 - beta1 if group["grad_averaging"] else 1.0,
            "beta2": beta2,
            "one_minus_beta2": 1 - beta2,
            "eps": number(group["eps"]),
            "adapt": bool(group["always_adapt"]) or decay != 0,
            "clip": bool(group["trust_clip"]),
            "max_param_norm": float("inf") if most is None else number(most),
        }

    def _row_numbers(self, group: Group, numbers: Numbers, steps: Steps) -> dict[str, Steps]:
        beta1, beta2 = numbers["beta1"], numbers["beta2"]
        steps = steps if group["bias_correction"] else steps * float("inf")
        return {
            "average_correction": 1 / (1 - beta1**steps),
            "root_correction": (1 - beta2**steps) ** -0.5,
        }

    def _check_sparse(self, group: Group, candidate: Candidate) -> None:
        raise RuntimeError("Lamb does not support sparse gradients")
