"""The optimizers under test, one row each: all that the contract tests know about them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusedoptim
from tests.references import adagrad, adam, lamb, sgd
from tests.references.lamb import ReferenceLamb

Kwargs = dict[str, Any]
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class OptimizerCase:
    """One optimizer, the torch class that it replaces, and its capabilities."""

    cls: type[Any]
    reference: type[torch.optim.Optimizer]
    algorithm: Callable[..., Tensor]
    """The update of one tensor, as in the paper."""
    kwargs: tuple[Kwargs, ...]
    """Configurations that behave differently."""
    invalid_kwargs: tuple[Kwargs, ...]
    """Arguments that the reference class refuses; ours must raise the same error."""
    refused_kwargs: tuple[Kwargs, ...]
    """Arguments that the reference accepts, and for which ours raises RuntimeError."""
    state_keys: tuple[str, ...]
    """Keys of the state after a step in the last configuration."""
    own_arguments: tuple[str, ...] = ("max_grad_norm", "split")
    """Arguments of ours that the reference does not have."""
    always: Kwargs = dataclasses.field(default_factory=dict)
    """Arguments that ours, and not the reference, always gets."""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    """Dtypes of parameters that ours accepts."""
    is_split: bool = False
    """Whether parameters become bfloat16, the upper halves of exact float32 values."""
    is_torchs: bool = True
    """Whether the reference is a class of torch.optim, and ours a subclass of it."""
    is_elementwise: bool = True
    """Whether an element's update depends on no other element."""
    supports_complex: bool = True
    supports_sparse_gradients: bool = True
    has_state_from_the_start: bool = False
    """Whether there is state before the first step."""

    @property
    def name(self) -> str:
        return self.cls.__name__

    def make(self, params: Any, **kwargs: Any) -> Any:
        """Make our optimizer."""
        return self.cls(params, **self.always, **_own(kwargs))

    def make_reference(self, params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Make the reference, which updates one parameter after the other."""
        if self.is_torchs:
            kwargs["foreach"] = False
        return self.reference(params, **_own(kwargs))

    def hyper_parameters(self, group: Kwargs) -> Kwargs:
        """Return the arguments of :attr:`algorithm` in a group."""
        return {k: group[k] for k in inspect.signature(self.algorithm).parameters if k in group}


def _own(kwargs: Kwargs) -> Kwargs:
    """Copy arguments for one optimizer: schedulers write into a learning rate that is a tensor."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in kwargs.items()}


_WIDE_BETAS = tuple(torch.tensor(beta, dtype=torch.float64) for beta in (0.8, 0.95))
# Options of torch.optim that a fused step does not have.
_REFUSED = ({"foreach": True}, {"differentiable": True}, {"fused": False})
_REFUSED_BY_ADAM = (*_REFUSED, {"capturable": True})
_ADAM_INVALID = (
    {"lr": -0.1},
    {"lr": torch.tensor([0.1, 0.2])},
    {"eps": -1e-8},
    {"betas": (1.0, 0.9)},
    {"betas": (0.9, -0.1)},
    {"weight_decay": -0.5},
)

SGD = OptimizerCase(
    cls=fusedoptim.FusedSGD,
    reference=torch.optim.SGD,
    algorithm=sgd.step,
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
    refused_kwargs=_REFUSED,
    state_keys=("momentum_buffer",),
)
ADAGRAD = OptimizerCase(
    cls=fusedoptim.FusedAdagrad,
    reference=torch.optim.Adagrad,
    algorithm=adagrad.step,
    kwargs=(
        {"lr": 0.1},
        {"lr": 0.1, "lr_decay": 0.5},
        {"lr": torch.tensor(0.1), "maximize": True, "eps": 0.1},
        {"lr": 0.1, "weight_decay": 0.1},
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
    ),
    invalid_kwargs=(
        {"lr": -0.1},
        {"lr": torch.tensor([0.1, 0.2])},
        {"lr_decay": -0.1},
        {"weight_decay": -0.5},
        {"initial_accumulator_value": -0.5},
        {"eps": -1e-8},
    ),
    refused_kwargs=_REFUSED,
    state_keys=("sum", "step"),
    has_state_from_the_start=True,
)
ADAM = OptimizerCase(
    cls=fusedoptim.FusedAdam,
    reference=torch.optim.Adam,
    algorithm=adam.step,
    kwargs=(
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
        {"lr": torch.tensor(0.1), "betas": _WIDE_BETAS, "eps": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True},
        {"lr": 0.1, "amsgrad": True},
        {"lr": 0.1, "betas": (0.8, 0.9), "amsgrad": True, "weight_decay": 0.1},
    ),
    invalid_kwargs=(*_ADAM_INVALID, {"betas": (0.9, torch.tensor(0.999))}),
    refused_kwargs=_REFUSED_BY_ADAM,
    state_keys=("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
    own_arguments=("max_grad_norm", "split", "state_dtype"),
    supports_sparse_gradients=False,
)
ADAMW = dataclasses.replace(
    ADAM,
    cls=fusedoptim.FusedAdamW,
    reference=torch.optim.AdamW,
    kwargs=(
        {"lr": 0.1},
        {"lr": torch.tensor(0.1), "betas": _WIDE_BETAS, "weight_decay": 0.0},
        {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True, "maximize": True},
        {"lr": 0.1, "betas": (0.375, 0.9), "eps": 0.1, "weight_decay": 0.1},
    ),
    state_keys=("exp_avg", "exp_avg_sq", "step"),
)
LAMB = OptimizerCase(
    cls=fusedoptim.FusedLamb,
    reference=ReferenceLamb,
    algorithm=lamb.step,
    kwargs=(
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
        {"lr": torch.tensor(0.1), "betas": (0.8, 0.95), "eps": 0.1},
        {"lr": 0.1, "bias_correction": False},
        {"lr": 0.1, "grad_averaging": False, "weight_decay": 0.1},
        {"lr": 0.1, "trust_clip": True},
        {"lr": 0.1, "max_param_norm": 1.5, "weight_decay": 0.1},
        {"lr": 0.1, "always_adapt": False},
        {"lr": 0.1, "always_adapt": False, "weight_decay": 0.1, "decoupled_decay": True},
        {"lr": 0.1, "weight_decay": 0.1},
    ),
    invalid_kwargs=_ADAM_INVALID,
    refused_kwargs=_REFUSED_BY_ADAM,
    state_keys=("exp_avg", "exp_avg_sq", "step"),
    own_arguments=(
        "foreach",
        "capturable",
        "differentiable",
        "fused",
        "max_grad_norm",
        "split",
    ),
    is_torchs=False,
    is_elementwise=False,
    supports_sparse_gradients=False,
)
SPLIT_SGD = dataclasses.replace(
    SGD,
    cls=fusedoptim.SplitSGD,
    kwargs=(
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
        {"lr": torch.tensor(0.1), "momentum": 0.9, "dampening": 0.5},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
    own_arguments=("max_grad_norm",),
    state_keys=("momentum_buffer", "trail"),
    dtypes=(torch.float32, torch.bfloat16),
    is_split=True,
    supports_complex=False,
)

CASES = (SGD, ADAGRAD, ADAM, ADAMW, LAMB, SPLIT_SGD)
WHOLE_CASES = tuple(case for case in CASES if not case.is_split)
TORCHS_CASES = tuple(case for case in WHOLE_CASES if case.is_torchs)
"""One case for each class of torch.optim that we replace."""

# The same with split=True, for the tests of values and state.
SPLIT_CASES = tuple(
    dataclasses.replace(
        case,
        always={"split": True},
        kwargs=case.kwargs[-2:],
        state_keys=(*case.state_keys, "trail"),
        dtypes=SPLIT_SGD.dtypes,
        is_split=True,
        supports_complex=False,
    )
    for case in WHOLE_CASES
)

ALL_CASES = CASES + SPLIT_CASES
CONFIGURATIONS = tuple((case, kwargs) for case in CASES for kwargs in case.kwargs)
# Every configuration in float32, which split parameters have too, and in float64, which leaves the
# least room for an error; the last one in all dtypes.
CONFIGURATIONS_AND_DTYPES = tuple(
    (case, kwargs, dtype)
    for case in ALL_CASES
    for kwargs in case.kwargs
    for dtype in case.dtypes
    if kwargs is case.kwargs[-1] or dtype in (torch.float32, torch.float64)
)


def configuration_id(value: object) -> str:
    """A readable pytest id for a case, keyword arguments or a dtype."""
    if isinstance(value, OptimizerCase):
        return value.name + "".join(f"({key})" for key in value.always)
    if isinstance(value, dict):
        return ",".join(f"{k}={_text(v)}" for k, v in value.items())
    return str(value).removeprefix("torch.")


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(_text, value))
    return str(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value)
