"""What an OffloadOptimizer accepts; everything else raises here, before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, distributed

from fusedoptim.split.hooks import data_parallels
from fusedoptim.step.checks import check_above_zero, check_norm
from fusedoptim.step.sharding import is_dtensor
from fusedoptim.step.tensors import has_memory, has_shared_elements


def check_arguments(
    optimizer_class: Any, max_grad_norm: Any, bucket_cap_mb: Any, copy_in_backward: Any
) -> None:
    """Raise unless the constructor can use its arguments."""
    if not callable(optimizer_class):
        raise TypeError(
            f"OffloadOptimizer: optimizer_class is of type {type(optimizer_class).__name__}; pass "
            "a class, such as fusedoptim.FusedAdamW, and its arguments by name"
        )
    check_norm(max_grad_norm)
    check_above_zero("bucket_cap_mb", bucket_cap_mb)
    if copy_in_backward not in (True, False):
        raise TypeError(
            f"OffloadOptimizer: copy_in_backward is {copy_in_backward!r}; pass True or False"
        )


def check_param(param: Tensor) -> None:
    """Raise unless the host can have a copy of ``param``."""
    if param.is_nested:
        raise TypeError(
            "OffloadOptimizer: a parameter is a nested tensor, and only strided ones work; make "
            "each of its .unbind() a parameter"
        )
    what = f"OffloadOptimizer: a parameter of shape {tuple(param.shape)}"
    if is_dtensor(param):
        raise TypeError(
            f"{what} is sharded (DTensor); give fully_shard a CPUOffloadPolicy, and its parameters "
            "to the optimizer's class itself"
        )
    if not has_memory(param):
        raise TypeError(
            f"{what} on {param.device} is a {type(param).__name__} with no memory of its own; "
            "construct the optimizer when the model has its values"
        )
    if has_shared_elements(param):
        raise RuntimeError(f"{what} has elements that share memory; clone() it first")


def check_no_bucket_views(params: Iterable[Tensor]) -> None:
    """Raise if DDP averages gradients without a trace after backward's hooks have copied them.

    This looks at all objects of a process that is one of several, so it is not for each step.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    own = set(params)
    for wrapper in data_parallels():
        if wrapper.gradient_as_bucket_view and not own.isdisjoint(wrapper.module.parameters()):
            raise RuntimeError(
                "OffloadOptimizer: the parameters are in a DistributedDataParallel with "
                "gradient_as_bucket_view=True, which averages gradients after they were copied to "
                "the host; set copy_in_backward=False"
            )
