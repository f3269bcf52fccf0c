"""Optimizers that torch.optim lacks, alone or with bfloat16 weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def ipex_lamb(params: list[Tensor], **options: Any) -> Any:
    """IPEX's Lamb, with the fused step that ``ipex.optimize`` gives it."""
    from intel_extension_for_pytorch.optim._lamb import Lamb
    from intel_extension_for_pytorch.optim._optimizer_utils import optimizer_fusion

    return optimizer_fusion(Lamb(params, **options), "cpu", True)


class ForeachLamb:
    """FusedLamb's update with torch's foreach functions, each of which passes over all tensors."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:
        self._params = params
        self._lr = lr
        self._betas = betas
        self._eps = eps
        self._weight_decay = weight_decay
        self._exp_avg = [torch.zeros_like(p, requires_grad=False) for p in params]
        self._exp_avg_sq = [torch.zeros_like(p, requires_grad=False) for p in params]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Take a step along the parameters' gradients."""
        self._steps += 1
        beta1, beta2 = self._betas
        grads = [p.grad for p in self._params if p.grad is not None]
        torch._foreach_lerp_(self._exp_avg, grads, 1 - beta1)
        torch._foreach_mul_(self._exp_avg_sq, beta2)
        torch._foreach_addcmul_(self._exp_avg_sq, grads, grads, 1 - beta2)
        divisors = torch._foreach_sqrt(self._exp_avg_sq)
        torch._foreach_div_(divisors, (1 - beta2**self._steps) ** 0.5)
        torch._foreach_add_(divisors, self._eps)
        updates = torch._foreach_div(self._exp_avg, divisors)
        torch._foreach_div_(updates, 1 - beta1**self._steps)
        if self._weight_decay != 0:
            torch._foreach_add_(updates, self._params, alpha=self._weight_decay)
        param_norms = torch.stack(torch._foreach_norm(self._params))
        update_norms = torch.stack(torch._foreach_norm(updates))
        ratios = torch.where(
            (param_norms > 0) & (update_norms > 0), param_norms / update_norms, 1.0
        )
        torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(self._params, updates, alpha=-self._lr)


class MasterSGD:
    """torch's fused SGD on a float32 master copy of bfloat16 parameters."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float) -> None:
        self._params = params
        self.masters = [p.detach().float().requires_grad_() for p in params]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self._optimizer = torch.optim.SGD(self.masters, lr=lr, momentum=momentum, fused=True)

    @property
    def momentum(self) -> list[Tensor]:
        """The momentum buffer of each parameter, after the first step."""
        return [self._optimizer.state[master]["momentum_buffer"] for master in self.masters]

    @torch.no_grad()
    def step(self) -> None:
        """Take a step along the parameters' gradients."""
        grads = [p.grad for p in self._params if p.grad is not None]
        torch._foreach_copy_([m.grad for m in self.masters if m.grad is not None], grads)
        self._optimizer.step()
        torch._foreach_copy_(self._params, self.masters)
