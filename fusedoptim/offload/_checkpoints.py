"""State_dicts of an OffloadOptimizer, whose state is in the optimizers of its buckets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusedoptim.offload._bucket import Bucket, own_options
from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.split.checkpoints import (
    changes_nothing,
    check_saved_halves,
    with_trails_of_frozen,
)
from fusedoptim.step.tensors import Group


def with_states(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Put the state that the host has into a state_dict."""
    states = {}
    for bucket, numbers, _ in _numbered(optimizer, state_dict):
        own = bucket.optimizer.state_dict()["state"]
        states.update({numbers[i]: state for i, state in own.items()})
    state_dict["state"] = dict(sorted(states.items())) | _others(state_dict)


def load_states(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Load the state on the host; return the part of the device's groups."""
    groups, saved = optimizer.param_groups, state_dict["param_groups"]
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved]:
        return state_dict  # torch raises
    numbered = list(_numbered(optimizer, state_dict))
    split = [
        (number, p)
        for bucket, numbers, _ in numbered
        for number, p, h in zip(numbers, bucket.params, bucket.host)
        if bucket.is_split(h)
    ]
    name = type(optimizer).__name__
    state = with_trails_of_frozen(name, state_dict["state"], split)
    check_saved_halves(name, [(i, p, state.get(i, {})) for i, p in split])
    splitting: list[tuple[Any, Any]] = [
        (bucket.optimizer, [(h, state.get(i, {})) for i, h in zip(numbers, bucket.host)])
        for bucket, numbers, _ in numbered
        if isinstance(bucket.optimizer, FusedOptimizer)
    ]
    if not all(changes_nothing(on_host.halves, on_host.state, of) for on_host, of in splitting):
        # Else a bucket of frozen parameters would look as if it kept what it has.
        for on_host, of in splitting:
            for h, _ in of:
                on_host.halves.expect_values(h)
    for bucket, numbers, saved_group in numbered:
        own = {i: state[number] for i, number in enumerate(numbers) if number in state}
        group = own_options(saved_group) | {"params": list(range(len(numbers)))}
        bucket.optimizer.load_state_dict({"state": own, "param_groups": [group]})
    return {**state_dict, "state": _others(state_dict)}


def _others(state_dict: dict[str, Any]) -> dict[Any, Any]:
    """What users keep in the state that is not of a parameter."""
    numbers = {number for group in state_dict["param_groups"] for number in group["params"]}
    return {key: value for key, value in state_dict["state"].items() if key not in numbers}


def _numbered(
    optimizer: Any, state_dict: dict[str, Any]
) -> Iterator[tuple[Bucket, list[Any], Group]]:
    """Each bucket with what a state_dict calls its parameters, and their group there."""
    found = {
        p: (number, saved)
        for group, saved in zip(optimizer.param_groups, state_dict["param_groups"])
        for p, number in zip(group["params"], saved["params"])
    }
    for bucket in optimizer._buckets:
        if bucket.group is not None:
            yield bucket, [found[p][0] for p in bucket.params], found[bucket.params[0]][1]
