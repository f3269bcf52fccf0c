"""The optimizer state that kernels update: found, checked and brought into their form."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedoptim.step.checks import check_state_shape
from fusedoptim.step.rule import UpdateRule
from fusedoptim.step.tensors import PARAM_DTYPES, TRAIL, State, laid_out_like


def variant_of(rule: UpdateRule, param: Tensor) -> str:
    """Which variant of the kernels updates ``param``."""
    return "split" if rule.is_split(param) else PARAM_DTYPES[param.dtype].variant


def state_tensor(
    rule: UpdateRule, owner: str, name: str, state: State, target: Tensor, dtype: torch.dtype
) -> Tensor:
    """The state ``name`` as a kernel takes it: of ``dtype``, in the element order of ``target``.

    Args:
        rule: of the group.
        owner: what errors call the parameter.
        name: of the state.
        state: of the parameter; what it lacks is made.
        target: the parameter's memory.
        dtype: of the state, but for a trail's.

    Raises:
        ValueError: the state has another shape, or a trail another dtype.
    """
    value = state.get(name)
    if name == TRAIL:
        dtype = torch.int16
    if value is None:
        return rule.initial_state(name, target, dtype)
    check_state_shape(rule, owner, name, value, target.shape)
    if name == TRAIL and value.dtype != dtype:
        raise ValueError(
            f"{rule.optimizer}: the state {TRAIL!r} of {owner}, a lower half, is {value.dtype} and "
            f"not {dtype}; load a state_dict by this optimizer's own load_state_dict"
        )
    if value.layout is not torch.strided:
        value = value.to_dense()
    return laid_out_like(target, value.to(target.device, dtype))
