"""The optimizer state that kernels update: found, checked and brought into their form."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from torch import Tensor

from fusedoptim.step.checks import check_state_shape
from fusedoptim.step.rule import UpdateRule
from fusedoptim.step.step_counts import KEY
from fusedoptim.step.tensors import PARAM_DTYPES, TRAIL, State, memory_of, state_dtype


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
        dtype: of the state, except for a trail, which is int16.
    """
    value = state.get(name)
    if name == TRAIL:
        dtype = torch.int16
    if value is None:
        return rule.initial_state(name, target, dtype)
    check_state_shape(rule, owner, name, value, target.shape)
    if name == TRAIL and value.dtype != dtype:
        raise ValueError(
            f"{rule.optimizer_name}: the state {TRAIL!r} of {owner}, a lower half, is "
            f"{value.dtype} and not {dtype}; load a state_dict by this optimizer's own "
            "load_state_dict"
        )
    if value.layout is not torch.strided:
        value = value.to_dense()
    return memory_of(value.to(target.device, dtype), target)


def restore_state(
    states: MutableMapping[Tensor, State], param: Tensor, saved: State, trail: Tensor | None
) -> None:
    """Put back from a checkpoint what torch's load has cast to the parameter's dtype.

    The parameter keeps its ``trail`` if the state that was ``saved`` has none.
    """
    if trail is not None and TRAIL not in saved:
        states[param][TRAIL] = trail
    for key, value in saved.items() if isinstance(saved, dict) else ():
        if key == TRAIL:
            states[param][key] = value.to(param.device, torch.int16, copy=True)
        elif isinstance(value, Tensor) and key != KEY and value.is_floating_point():
            dtype = state_dtype(param)
            if dtype != param.dtype:
                states[param][key] = value.to(param.device, dtype, copy=True)
