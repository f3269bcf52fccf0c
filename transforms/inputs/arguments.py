"""Refuses models and optimizers that cannot be rewritten, and says what to do instead."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.split.hooks import check_no_hooks
from transforms.rewrites import compiled_call, int8, plain_tensors, split, stand_ins
from transforms.rewrites.fused_step import is_schedulers
from transforms.rewrites.packed import PackedModule

_WRAPPERS = {
    "DistributedDataParallel": "DDP",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FSDP",
    "FSDPModule": "FSDP2 (fully_shard)",
}
_BEFORE_DDP = "optimize the model inside first, then wrap what optimize returns"
_BEFORE_FSDP = (
    f"{_BEFORE_DDP} and make its optimizer; with auto_channels_last=False, as FSDP takes "
    "only contiguous weights"
)


def check_is_module(model: Any) -> None:
    """Raise TypeError unless ``model`` is a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is of type {type(model).__name__}, not a torch.nn.Module")


def check_model(model: Any) -> None:
    """Raise unless ``model`` is a plain module on one device."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"{type(model).__name__} cannot be rewritten: optimize the model first, then "
            "torch.jit.script or torch.jit.trace it"
        )
    check_is_module(model)
    for name, module in model.named_modules():
        _check_not_wrapped(name or "the model", module)
    tensors = [*model.parameters(), *model.buffers()]
    if any(map(is_lazy, tensors)):
        raise ValueError("the model has lazy parameters: run it once on a batch, then optimize it")
    devices = sorted({str(t.device) for t in tensors})
    if len(devices) > 1:
        raise ValueError(
            f"the model is on several devices ({', '.join(devices)}): move it to one with "
            "model.to(device) first"
        )
    if devices == ["meta"]:
        raise ValueError("the model has no values (device meta): load its weights first")


def _check_not_wrapped(name: str, module: nn.Module) -> None:
    # Importing it is slow, and only torch.compile does so.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    is_compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    has_call = module._compiled_call_impl is not None and not compiled_call.is_entered(module)
    if is_compiled or has_call:
        raise TypeError(
            f"{name} is compiled: optimize the model first, then torch.compile what that returns"
        )
    if getattr(module, "_is_fsdp_managed_module", False):
        raise TypeError(f"{name} is inside FSDP, which owns its weights: {_BEFORE_FSDP}")
    for cls in type(module).__mro__:
        wrapper = _WRAPPERS.get(cls.__name__)
        if wrapper is not None and cls.__module__.startswith("torch."):
            cure = _BEFORE_FSDP if "FSDP" in wrapper else f"{_BEFORE_DDP} (the inside is .module)"
            raise TypeError(f"{name} is wrapped in {wrapper}: {cure}")
    for param in module.parameters(recurse=False):
        if any(cls.__name__ == "DTensor" for cls in type(param).__mro__):
            raise TypeError(f"{name} has sharded weights (DTensor): {_BEFORE_FSDP}")


def check_pair(model: nn.Module, optimizer: Any) -> None:
    """Raise unless a model in training mode, and only such a model, comes with its optimizer."""
    if isinstance(optimizer, torch.dtype):
        raise TypeError(
            f"optimizer={optimizer}: pass the dtype by name, as in "
            f"optimize(model, dtype={optimizer})"
        )
    check_optimizer(optimizer)
    if model.training and optimizer is None:
        raise ValueError(
            "the model is in training mode and there is no optimizer: call model.eval() first to "
            "optimize it for inference, or pass the optimizer to optimize both for training"
        )
    if not model.training and optimizer is not None:
        raise ValueError(
            "the model is in eval mode and there is an optimizer: call model.train() first to "
            "optimize both for training, or omit the optimizer for inference"
        )
    if optimizer is not None:
        check_same_parameters(model, optimizer)


def check_optimizer(optimizer: Any) -> None:
    """Raise TypeError unless ``optimizer`` is one, or None."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer is of type {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )


def check_same_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise unless all parameters of ``optimizer`` are the model's."""
    own = set(map(id, model.parameters()))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    foreign = sum(id(p) not in own for p in params)
    if foreign:
        raise ValueError(
            f"{foreign} of the {len(params)} parameters of the optimizer are not in this "
            f"{type(model).__name__}: make the optimizer from its parameters(); several models "
            "with one optimizer go into one torch.nn.ModuleDict"
        )


def check_not_for_inference(model: nn.Module) -> None:
    """Raise if ``model``, which is to be trained, is optimized for inference."""
    is_rewritten = plain_tensors.rewrites(model) or int8.is_quantized(model)
    if is_rewritten or any(
        stand_ins.is_stand_in(m) or isinstance(m, PackedModule) or compiled_call.is_marked(m)
        for m in model.modules()
    ):
        raise ValueError(
            "the model is optimized for inference: call transforms.restore(model) first, then "
            "optimize it for training"
        )


def check_halves(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise if another optimizer holds the lower halves of weights to be rewritten."""
    own = getattr(optimizer, "halves", None)
    updated = [p for group in optimizer.param_groups for p in group["params"]] if optimizer else []
    for halves in split.halves_in(model):
        if halves is own or halves.is_alone:
            continue
        if optimizer is None or any(p in halves for p in updated):
            raise ValueError(
                "the model's weights are split into halves, and an optimizer holds the lower ones: "
                "call transforms.restore(model, optimizer) with that optimizer"
            )


def check_no_wrapper(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise if weights that are to be merged are in a DistributedDataParallel."""
    if isinstance(optimizer, FusedOptimizer) and not optimizer.split:
        merged = [p for p in model.parameters() if p in optimizer.halves]
        check_no_hooks(type(optimizer).__name__, merged)


def check_in_place(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise unless a call may rewrite ``model`` and ``optimizer`` themselves, not copies of them.

    The halves of weights must be those of ``optimizer``. A model that was copied without its
    optimizer has its own.
    """
    check_halves(model, optimizer)
    if any(halves.is_alone for halves in split.halves_in(model)):
        raise ValueError(
            "the model's weights are split into halves, and it was copied without its optimizer: "
            "call transforms.restore(model) first"
        )


def refuse_replaced_methods(optimizer: Optimizer) -> None:
    """Raise if a method was replaced on the optimizer object itself, except by a scheduler."""
    for name, value in vars(optimizer).items():
        if callable(getattr(type(optimizer), name, None)) and not is_schedulers(optimizer, value):
            raise RuntimeError(
                f"optimizer.{name} was replaced on this object by "
                f"{getattr(value, '__qualname__', value)!r}, which would keep calling the original "
                "method; call transforms.optimize first and wrap its result, or pass "
                "fuse_update_step=False and inplace=True"
            )
