"""Our own versions of the Lamb classes of timm, apex and torch_optimizer.

Each has its library's options, defaults and state, and updates one tensor after the other; apex's
own needs an NVIDIA GPU. Equality with the libraries' classes was checked by hand (timm 1.0.31,
torch_optimizer 0.3.0; apex's by its source).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.references import lamb


def _update(p: Tensor, grad: Tensor, state: Any, t: int, group: Any, **options: Any) -> None:
    options |= {k: group[k] for k in lamb.HYPER_PARAMETERS if k in group}
    moments = {k: state[k] for k in ("exp_avg", "exp_avg_sq") if k in state}
    p.copy_(lamb.step(p, grad, moments, t, **options))
    state.update(moments)


class _CountingByGroup(Optimizer):
    """The common part of timm's and apex's classes."""

    first: Any = 0

    def options(self) -> dict[str, Any]:
        """Arguments of :func:`tests.references.lamb.step` that a group does not have."""
        return {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        grads = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        limit = self.defaults["max_grad_norm"]
        norms = [float(torch.linalg.vector_norm(grad)) for grad in grads]
        clip = max(1.0, math.hypot(*norms) / limit) if limit is not None else 1.0
        for group in self.param_groups:
            group["step"] = group.get("step", self.first) + 1
            for p in group["params"]:
                if p.grad is not None:
                    t = int(group["step"])
                    _update(p, p.grad / clip, self.state[p], t, group, **self.options())
        return loss


_COMMON: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6}
_BY_GROUP = _COMMON | {
    "bias_correction": True,
    "weight_decay": 0.01,
    "grad_averaging": True,
    "max_grad_norm": 1.0,
}
_TIMMS = _BY_GROUP | {
    "trust_clip": False,
    "always_adapt": False,
    "caution": False,
    "decoupled_decay": False,
    "corrected_weight_decay": False,
    "foreach": None,
}


class Timms(_CountingByGroup):
    first = torch.tensor(0.0)

    def __init__(self, params: Any, **kwargs: Any) -> None:
        options = _TIMMS | kwargs
        super().__init__(params, options | {"max_lr_snapshot": options["lr"]})


class Apexs(_CountingByGroup):
    def __init__(
        self, params: Any, adam_w_mode: bool = True, use_nvlamb: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(params, _BY_GROUP | kwargs)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self.set_grad_none = True

    def options(self) -> dict[str, Any]:
        return {"always_adapt": self.use_nvlamb}


class _CountingByParameter(Optimizer):
    """The class of torch_optimizer."""

    def __init__(
        self,
        params: Any,
        clamp_value: float = 10,
        adam: bool = False,
        debias: bool = False,
        **kwargs: Any,
    ) -> None:
        self.clamp_value = clamp_value
        self.adam = adam
        self.debias = debias
        super().__init__(params, _COMMON | {"weight_decay": 0} | kwargs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state, old = self.state[p], p.clone()
                    state["step"] = t = state.get("step", 0) + 1
                    limit = float(self.clamp_value)
                    _update(p, p.grad, state, t, group, bias_correction=False, max_param_norm=limit)
                    update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + group["eps"])
                    state["weight_norm"] = torch.linalg.vector_norm(old).clamp(max=limit)
                    state["adam_norm"] = torch.linalg.vector_norm(
                        update + group["weight_decay"] * old
                    )
        return loss


class TorchOptimizers(_CountingByParameter): ...


# The classes are recognized by these names.
Timms.__module__, Timms.__name__ = "timm.optim.lamb", "Lamb"
Apexs.__module__, Apexs.__name__ = "apex.optimizers.fused_lamb", "FusedLAMB"
TorchOptimizers.__module__, TorchOptimizers.__name__ = "torch_optimizer.lamb", "Lamb"
