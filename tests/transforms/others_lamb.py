"""Lamb classes as timm, apex and torch_optimizer have them, in our words.

Each has its library's options, defaults, state and order of operations, one tensor after the other;
apex's own needs an NVIDIA GPU. Equality with the libraries' classes was checked by hand (timm
1.0.31, torch_optimizer 0.3.0; apex's by its source).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


class _CountingByGroup(Optimizer):
    """What timm's and apex's have in common."""

    def _adapts(self, group: dict[str, Any]) -> bool:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        limit = self.defaults["max_grad_norm"]
        clip = 1.0
        if limit is not None and grads:
            clip = max(1.0, math.hypot(*map(_norm, grads)) / limit)
        for group in self.param_groups:
            group["step"] = group.get("step", self.first) + 1  # type: ignore[attr-defined]
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p, p.grad / clip)
        return loss

    def _update(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        m.mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1.0)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = float(group["step"]) if group["bias_correction"] else math.inf
        update = (m / (1 - beta1**step)) / (v.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"])
        lr, decay = group["lr"], group["weight_decay"]
        if group.get("decoupled_decay"):
            p.mul_(1 - lr * decay)
        elif decay:
            update = update + decay * p
        ratio = 1.0
        if self._adapts(group) and _norm(p) and _norm(update):
            ratio = _norm(p) / _norm(update)
            ratio = min(ratio, 1.0) if group.get("trust_clip") else ratio
        p.sub_(lr * ratio * update)


class Timms(_CountingByGroup):
    first = torch.tensor(0.0)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        trust_clip: bool = False,
        always_adapt: bool = False,
        caution: bool = False,
        decoupled_decay: bool = False,
        corrected_weight_decay: bool = False,
        foreach: bool | None = None,
    ) -> None:
        values = locals()
        options = {k: values[k] for k in values if k not in ("self", "params", "__class__")}
        super().__init__(params, options | {"max_lr_snapshot": lr})

    def _adapts(self, group: dict[str, Any]) -> bool:
        return group["weight_decay"] != 0 or group["always_adapt"]


class Apexs(_CountingByGroup):
    first = 0

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        values = locals()
        names = ("lr", "bias_correction", "betas", "eps", "weight_decay", "grad_averaging")
        super().__init__(params, {k: values[k] for k in (*names, "max_grad_norm")})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self.set_grad_none = True

    def _adapts(self, group: dict[str, Any]) -> bool:
        return group["weight_decay"] != 0 or self.use_nvlamb


class _CountingByParameter(Optimizer):
    """torch_optimizer's."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        clamp_value: float = 10,
        adam: bool = False,
        debias: bool = False,
    ) -> None:
        self.clamp_value = clamp_value
        self.adam = adam
        self.debias = debias
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p, p.grad)
        return loss

    def _update(self, group: dict[str, Any], p: Tensor, grad: Tensor) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        m, v = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
        norms = min(_norm(p), self.clamp_value), _norm(update)
        ratio = norms[0] / norms[1] if all(norms) else 1.0
        state.update(weight_norm=torch.tensor(norms[0]), adam_norm=torch.tensor(norms[1]))
        p.sub_(group["lr"] * ratio * update)


class TorchOptimizers(_CountingByParameter):
    pass


# By these names they are known.
Timms.__module__, Timms.__name__ = "timm.optim.lamb", "Lamb"
Apexs.__module__, Apexs.__name__ = "apex.optimizers.fused_lamb", "FusedLAMB"
TorchOptimizers.__module__, TorchOptimizers.__name__ = "torch_optimizer.lamb", "Lamb"
