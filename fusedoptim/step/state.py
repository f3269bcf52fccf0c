"""The optimizer state that kernels update: found, checked and brought into their form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Set
from typing import Any

import torch
from torch import Tensor, distributed

from fusedoptim.kernels.language import Role
from fusedoptim.launch.devices import BACKENDS
from fusedoptim.launch.layout import Argument
from fusedoptim.step import float8
from fusedoptim.step.checks import check_state_place, check_state_shape
from fusedoptim.step.rule import UpdateRule
from fusedoptim.step.sharding import is_dtensor, like_param, local_of
from fusedoptim.step.step_counts import KEY
from fusedoptim.step.tensors import (
    PARAM_DTYPES,
    TRAIL,
    State,
    memory_of,
    same_order,
    state_dtype,
)


def variant_of(rule: UpdateRule, param: Tensor) -> str:
    """Which variant of the kernels updates ``param``."""
    return "split" if rule.is_split(param) else PARAM_DTYPES[param.dtype].variant


_DTYPES = {Role.TRAIL: torch.int16, Role.STATE_BF16: torch.bfloat16}
"""The dtypes of state that do not depend on the parameter's."""
_STATE = (Role.STATE, *_DTYPES, *float8.DTYPES, Role.BLOCK_SCALES)


def names_of(role: Role, arguments: Iterable[Argument]) -> list[str]:
    """The arguments that have this role."""
    return [name for name, its_role in arguments if its_role is role]


def state_arguments(arguments: Iterable[Argument]) -> dict[str, Role]:
    """The state that kernels with these ``arguments`` update, by name."""
    return {name: role for name, role in arguments if role in _STATE}


def local_state(rule: UpdateRule, owner: str, param: Tensor, names: Mapping[str, Role]) -> State:
    """The state of a parameter, with this process's shards of state that is sharded like it.

    The trail of a parameter that has taken no step is part of it.
    """
    state = rule.states.get(param, {})
    if Role.TRAIL in names.values() and TRAIL not in state:
        trail = rule.trail_before_first_step(param)
        state = state if trail is None else {**state, TRAIL: trail}
    if not is_dtensor(param):
        return state
    local = dict(state)
    for name, role in names.items():
        value = state.get(name)
        if value is not None and role is not Role.BLOCK_SCALES:
            check_state_place(rule, owner, name, value, param)
            local[name] = local_of(value)
    return local


def state_tensors(
    rule: UpdateRule, owner: str, names: Mapping[str, Role], state: State, target: Tensor
) -> State:
    """A parameter's state as kernels take it: in the element order of ``target``.

    Args:
        rule: the group's rule.
        owner: the parameter's name in errors.
        names: the names of the state, with the roles of the kernels' arguments.
        state: the parameter's state; what is missing is made.
        target: the parameter's memory.
    """
    made: State = {}
    for name, role in names.items():
        if role in float8.DTYPES:
            made |= _encoded_tensors(rule, owner, name, role, state, target)
        elif role is not Role.BLOCK_SCALES:
            made[name] = _state_tensor(rule, owner, name, state, target, _dtype(role, target))
    return {name: made[name] for name in names}


def _dtype(role: Role, param: Tensor) -> torch.dtype:
    return _DTYPES.get(role) or PARAM_DTYPES[param.dtype].state


def _encoded_tensors(
    rule: UpdateRule, owner: str, name: str, role: Role, state: State, target: Tensor
) -> State:
    """The codes of the state ``name``, and their scales."""
    lanes, dtype = BACKENDS[target.device.type].shape.lanes, float8.DTYPES[role]
    shape = float8.scales_shape(target.numel(), lanes)
    values, scales = state.get(name), state.get(name + float8.SUFFIX)
    if values is not None:
        check_state_shape(rule, owner, name, values, target.shape)
    if values is None:
        codes = rule.initial_state(name, target, torch.uint8).view(dtype)
        scales = torch.zeros(shape, dtype=float8.SCALES, device=target.device)
    elif not (values.is_floating_point() or float8.is_encoded(state, name)):
        raise ValueError(
            f"{rule.optimizer_name}: the state {name!r} of {owner} is {values.dtype}, without "
            f"{name + float8.SUFFIX!r}; set a floating-point tensor, or delete "
            "optimizer.state[parameter]"
        )
    elif (
        scales is None
        or values.dtype is not dtype
        or scales.shape != shape
        or not same_order(values, target)
    ):
        if scales is not None and float8.is_encoded(state, name):
            values = float8.decoded(values, scales)
        values = memory_of(values.to(target.device), target)
        codes, scales = float8.encoded(values, dtype, lanes)
    else:
        codes = values.to(target.device)
    return {name: codes, name + float8.SUFFIX: scales.to(target.device)}


def state_width(role: Role, param: Tensor) -> int:
    """Bytes of one real number of a state of ``param``."""
    if role in float8.DTYPES:
        return 1
    return _dtype(role, param).itemsize // PARAM_DTYPES[param.dtype].components


def _state_tensor(
    rule: UpdateRule, owner: str, name: str, state: State, target: Tensor, dtype: torch.dtype
) -> Tensor:
    """The state ``name`` as a kernel takes it: of ``dtype``, in the element order of ``target``."""
    value = state.get(name)
    if value is None:
        return rule.initial_state(name, target, dtype)
    check_state_shape(rule, owner, name, value, target.shape)
    if name == TRAIL and value.dtype not in (dtype, torch.int32):  # int32 is how it is saved
        raise ValueError(
            f"{rule.optimizer_name}: the state {TRAIL!r} of {owner}, a lower half, is "
            f"{value.dtype} and not {dtype}; load a state_dict by this optimizer's own "
            "load_state_dict"
        )
    if value.layout is not torch.strided:
        value = value.to_dense()
    return memory_of(value.to(target.device, dtype), target)


def numbers_in(state_dict: dict[str, Any]) -> list[Any]:
    """The numbers that a state_dict gives the parameters, in their order."""
    return [i for group in state_dict["param_groups"] for i in group["params"]]


def as_saved_state(state: Any, unsaved: Set[str]) -> Any:
    """A parameter's state, or anything else that users keep in the state, as a checkpoint has it.

    Args:
        state: the state.
        unsaved: the names of what a checkpoint lacks.
    """
    if not isinstance(state, dict):
        return state
    readable = float8.readable(state).items()
    return {name: as_saved_value(name, value) for name, value in readable if name not in unsaved}


def as_saved_value(name: str, value: Any) -> Any:
    """The value that a checkpoint has for the state ``name``.

    Neither gloo nor NCCL sends int16, so trails are widened where there are other processes, to
    which torch.distributed.checkpoint may send a state_dict.
    """
    if name != TRAIL or not (is_dtensor(value) or distributed.is_initialized()):
        return value
    return like_param(local_of(value).int(), value)


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict) and not value


def without_gaps(saved: Any) -> Any:
    """A parameter's state in a checkpoint, without names that have no value.

    torch.distributed.checkpoint makes an empty dict for what a flat checkpoint lacks, such as the
    scales of 8-bit state.
    """
    if not isinstance(saved, dict):
        return saved
    return {name: value for name, value in saved.items() if not _is_empty(value)}


def without_trails(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The parameters' states in a checkpoint without trails; one with only a trail is omitted."""
    rest = {
        i: {name: value for name, value in saved.items() if name != TRAIL}
        if isinstance(saved, dict)
        else saved
        for i, saved in states.items()
    }
    return without_empty(rest)


def without_empty(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """The states of a checkpoint without empty ones."""
    return {i: state for i, state in states.items() if not _is_empty(state)}


def restore_state(
    states: MutableMapping[Tensor, State], param: Tensor, saved: State, trail: Tensor | None
) -> None:
    """Restore from a checkpoint the values that torch's load has cast to the parameter's dtype.

    A parameter that has taken steps gets its ``trail`` too.
    """
    dtype = state_dtype(param)
    for key, value in saved.items() if isinstance(saved, dict) and dtype != param.dtype else ():
        if isinstance(value, Tensor) and key != KEY and value.is_floating_point():
            states[param][key] = value.to(param.device, dtype, copy=True)
    if trail is not None and states.get(param):
        states[param] = {**saved, **states[param], TRAIL: trail}  # in the order of the checkpoint
