"""The lower halves of split parameters in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from fusedoptim._warn import warn
from fusedoptim.split.halves import Halves
from fusedoptim.step.sharding import like_param, local_of
from fusedoptim.step.state import as_saved_state, as_saved_value, without_empty
from fusedoptim.step.tensors import TRAIL, new_state


def saved_states(
    halves: Halves,
    states: Mapping[Any, Any],
    params: Sequence[tuple[Any, Tensor]],
    unsaved: Set[str],
) -> dict[Any, Any]:
    """The states that a checkpoint has, with trails of parameters without state.

    Args:
        halves: the optimizer's.
        states: the states, by the keys of the parameters.
        params: the key of each parameter, its number or name, and the parameter.
        unsaved: the names of what the checkpoint lacks.
    """
    trails = [halves.before_first_step(p) for _, p in params]  # first, as stale ones become zero
    saved = {key: as_saved_state(state, unsaved) for key, state in states.items()}
    for (key, _), trail in zip(params, trails):
        if trail is not None and TRAIL not in unsaved:
            saved[key] = saved.get(key, {}) | {TRAIL: as_saved_value(TRAIL, trail)}
    return without_empty(saved)


def changes_nothing(
    halves: Halves, states: Mapping[Tensor, Any], saved: Iterable[tuple[Tensor, Any]]
) -> bool:
    """Whether a checkpoint is what an optimizer has, whose split parameters took no step.

    Accelerate loads an optimizer's own state_dict, before DistributedDataParallel writes the upper
    halves. In other checkpoints the trails belong to upper halves that may be loaded later.

    Args:
        halves: the optimizer's.
        states: the optimizer's states.
        saved: each parameter and its state in the checkpoint.
    """
    saved = [(p, state) for p, state in saved if p in halves or state or states.get(p)]
    have_same_names = all(
        isinstance(state, dict) and {*state, TRAIL} == {*states.get(p, ()), TRAIL}
        for p, state in saved
    )
    return have_same_names and halves.have((p, s.get(TRAIL)) for p, s in saved if p in halves)


def with_trails_of_frozen(
    optimizer: str, states: dict[Any, Any], params: Iterable[tuple[Any, Tensor]]
) -> dict[Any, Any]:
    """The states of a checkpoint, with trails of zeros for frozen parameters that have none there.

    The functions of torch.distributed.checkpoint load no state of parameters that require no
    gradient. The trail that such a parameter has may be the lower half of another weight.

    Args:
        optimizer: its name in the warning.
        states: the states.
        params: the key of each split parameter, its number or name, and the parameter.
    """
    if not any(map(has_trail, states.values())):
        return states
    lost = {k: p for k, p in params if not p.requires_grad and not has_trail(states.get(k))}
    if lost:
        warn(
            f"{optimizer}: the checkpoint has no lower halves of the frozen parameters "
            f"{', '.join(map(str, lost))}, which torch.distributed.checkpoint does not load; they "
            "are zero now, and the exact values the bfloat16 ones",
            UserWarning,
        )
    whole = dict(states)
    for k, p in lost.items():
        zeros = new_state(local_of(p), torch.int16).zero_()
        whole[k] = states.get(k, {}) | {TRAIL: like_param(zeros, p)}
    return whole


def has_trail(state: Any) -> bool:
    """Whether a parameter's state in a checkpoint has a lower half."""
    return isinstance(state, dict) and TRAIL in state


def check_saved_halves(optimizer: str, saved: Iterable[tuple[int, Tensor, dict[str, Any]]]) -> None:
    """Raise unless a checkpoint has the trails of all split parameters, or of none.

    Args:
        optimizer: its name in errors.
        saved: for each split parameter its number, itself, and its state in the checkpoint.
    """
    saved = list(saved)
    if not any(TRAIL in state for _, _, state in saved):
        return
    for i, p, state in saved:
        trail = state.get(TRAIL)
        if trail is None:
            raise ValueError(
                f"{optimizer}: the checkpoint has lost the {TRAIL!r} of parameter {i} (shape "
                f"{tuple(p.shape)}), the lower half of its values; load a whole checkpoint"
            )
        if trail.dtype.is_floating_point:
            raise ValueError(
                f"{optimizer}: the {TRAIL!r} of parameter {i} in the checkpoint is {trail.dtype}: "
                "an optimizer of torch's has loaded and saved it, which rounds the lower halves. "
                f"Remove {TRAIL!r} from each of the checkpoint's states to keep the lower halves "
                "that the optimizer has, or load a checkpoint that this class has saved"
            )
        if trail.shape != p.shape or trail.dtype not in (torch.int16, torch.int32):
            raise ValueError(
                f"{optimizer}: the {TRAIL!r} of parameter {i} in the checkpoint is {trail.dtype} "
                f"of shape {tuple(trail.shape)}, and the parameter's is torch.int16 of shape "
                f"{tuple(p.shape)}; load the checkpoint of the same model"
            )
