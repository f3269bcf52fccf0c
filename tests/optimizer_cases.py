"""The optimizers under test, one row each. The contract tests read nothing else about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import fusedoptim

Kwargs = dict[str, Any]


@dataclass(frozen=True)
class OptimizerCase:
    """One optimizer, the torch class that it stands for, and what it can do."""

    cls: type[torch.optim.Optimizer]
    reference: type[torch.optim.Optimizer]
    kwargs: tuple[Kwargs, ...]
    """Each is a configuration that behaves differently."""
    invalid_kwargs: tuple[Kwargs, ...]
    """The reference class refuses each; ours must with the same error."""
    refused_kwargs: tuple[Kwargs, ...]
    """Ours refuses each with a RuntimeError, though the reference takes it."""
    state_keys: tuple[str, ...]
    """Of a parameter that took a step under the last of ``kwargs``."""
    dtypes: tuple[torch.dtype, ...] = field(
        default=(torch.float32, torch.float64, torch.bfloat16, torch.float16)
    )
    supports_complex: bool = True
    supports_sparse_gradients: bool = True

    @property
    def name(self) -> str:
        return self.cls.__name__


CASES = (
    OptimizerCase(
        cls=fusedoptim.FusedSGD,
        reference=torch.optim.SGD,
        kwargs=(
            {"lr": 0.1},
            {"lr": 0.1, "weight_decay": 0.1},
            {"lr": torch.tensor(0.1), "maximize": True},
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
            {"lr": 0.1, "momentum": 0.9, "maximize": True, "weight_decay": 0.1},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True},
            {"lr": torch.tensor(0.1), "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ),
        invalid_kwargs=(
            {"lr": -0.1},
            {"lr": torch.tensor([0.1, 0.2])},
            {"momentum": -0.5},
            {"weight_decay": -0.5},
            {"nesterov": True},
            {"momentum": 0.9, "dampening": 0.1, "nesterov": True},
        ),
        refused_kwargs=({"foreach": True}, {"differentiable": True}, {"fused": False}),
        state_keys=("momentum_buffer",),
    ),
)

CONFIGURATIONS = tuple((case, kwargs) for case in CASES for kwargs in case.kwargs)


def configuration_id(value: object) -> str:
    """A readable pytest id for a case, keyword arguments or a dtype."""
    if isinstance(value, OptimizerCase):
        return value.name
    if isinstance(value, dict):
        return ",".join(f"{k}={v.item() if torch.is_tensor(v) else v}" for k, v in value.items())
    return str(value).removeprefix("torch.")
