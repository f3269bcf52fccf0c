r"""SGD on bfloat16 parameters that lose nothing: the lower 16 bits are optimizer state."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from fusedoptim.sgd import FusedSGD

__all__ = ["SplitSGD"]


class SplitSGD(FusedSGD):
    r"""SGD on bfloat16 parameters, exact as on float32 ones.

    .. math::
        \theta &\leftarrow p \mathbin{\Vert} t \quad (\text{upper and lower 16 bits}) \\
        g &\leftarrow \pm \nabla f(p) + \lambda\,\theta \\
        b &\leftarrow \mu\,b + (1-\tau)\,g \quad (b \leftarrow g \text{ at first}) \\
        p \mathbin{\Vert} t &\leftarrow \theta - \gamma\,b \quad
            (\theta - \gamma\,(g + \mu\,b) \text{ with Nesterov})

    A parameter is the upper half of a float32 value :math:`\theta`; the lower half is the state
    ``trail``. Forward and backward passes use the bfloat16 half. A step joins the halves, updates
    :math:`\theta` in float32 as :class:`FusedSGD` does, and splits it again, so that updates too
    small for bfloat16 add up in the trail. A weight takes 4 bytes; a bfloat16 parameter with a
    float32 master copy takes 6.

    Args:
        params: bfloat16 parameters, whose trail begins at zero, or float32 ones. The latter are
            converted in place, without losing a bit; the Parameter objects stay the same.
        lr: learning rate :math:`\gamma`, a number or a one-element tensor.
        momentum: factor :math:`\mu` of the momentum, which is float32.
        dampening: :math:`\tau`; from a parameter's second step on.
        weight_decay: L2 penalty :math:`\lambda`.
        nesterov: Nesterov momentum; needs a momentum and no dampening.
        maximize: ascend instead.
        foreach: None or False.
        differentiable: False.
        fused: None or True.
        max_grad_norm: clip the gradients' norm, over all parameters, to this first.

    Raises:
        TypeError: a parameter is neither float32 nor bfloat16; nothing was converted then.
        ValueError: a hyper-parameter out of range.
        RuntimeError: an option that asks for another implementation.

    Example:
        >>> import torch
        >>> from fusedoptim import SplitSGD
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = SplitSGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> [p.dtype for p in optimizer.master_params()]
        [torch.float32, torch.float32]

    A state_dict of torch.optim.SGD loads exactly, and leaves the trails unchanged. Writing to a
    parameter by other means changes only its upper half; before its first step, the trail, which
    belongs to other values, becomes zero.

    Source: the split of IPEX's ``split_master_weight_for_bf16``.
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
        max_grad_norm: float | None = None,
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
            split=True,
        )
