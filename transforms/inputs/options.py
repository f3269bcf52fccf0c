"""The arguments of :func:`transforms.optimize`, checked, with the level's defaults filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

LEVELS = ("O0", "O1")
DTYPE, FUSE_STEP, SPLIT = "dtype", "fuse_update_step", "split_master_weight_for_bf16"
FUSE, FOLD_CONSTANTS, GRAPH_MODE = "fuse", "fold_constants", "graph_mode"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Options(NamedTuple):
    """The options of one call."""

    dtype: torch.dtype | None
    """bfloat16 or float16; None casts nothing."""
    knobs: Mapping[str, bool]
    """for each knob, by name, whether its pass runs."""
    explicit: frozenset[str]
    """knobs that the call itself turned on."""
    refused: frozenset[str] = frozenset()
    """knobs that the call itself turned off."""


def check_knobs(level: str, dtype: Any, inplace: Any, knobs: Mapping[str, Any]) -> None:
    """Raise if an argument has the wrong type or an unknown value."""
    check_flag("inplace", inplace)
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is unknown; use 'O0' (only what is asked for) or 'O1'")
    if dtype is not None and dtype not in _DTYPES:
        choices = "torch.bfloat16, torch.float16, torch.float32 or None"
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r} is not a torch.dtype; use {choices}")
        raise ValueError(f"dtype={dtype} is not supported; use {choices}")
    for name, value in knobs.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is not True, False or None")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless the argument ``name`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is not True or False")


def resolve(
    dtype: torch.dtype | None,
    knobs: Mapping[str, bool | None],
    defaults: Mapping[str, bool],
    is_training: bool,
) -> Options:
    """Fill in the defaults, for the knobs of the model's mode only.

    Raises:
        ValueError: a knob of the other mode, or two that exclude each other.
    """
    for name, value in knobs.items():
        if value and name not in defaults:
            now, other = ("training", "eval") if is_training else ("eval", "train")
            raise ValueError(
                f"{name}=True is for a model in {other} mode, and this one is in {now} mode: "
                f"call model.{other}() first, or omit it"
            )
    low = dtype if dtype in (torch.bfloat16, torch.float16) else None
    given = {name: value for name, value in knobs.items() if value is not None}
    chosen = {name: given.get(name, default) for name, default in defaults.items()}
    if is_training:
        if low is None and not knobs[SPLIT]:  # the level's default is for bfloat16
            chosen[SPLIT] = False
        _check_training(low, chosen)
    elif chosen[FOLD_CONSTANTS] and not chosen[GRAPH_MODE]:
        raise ValueError(
            f"{FOLD_CONSTANTS}=True needs {GRAPH_MODE}=True: without it, constants are code of "
            "forward, which is not rewritten"
        )
    explicit = frozenset(name for name in chosen if given.get(name))
    return Options(low, chosen, explicit, frozenset(name for name in given if not given[name]))


def _check_training(dtype: torch.dtype | None, chosen: Mapping[str, bool]) -> None:
    """Raise if the knobs for training contradict each other or the dtype."""
    if dtype == torch.float16:
        raise ValueError(
            "dtype=torch.float16 is for inference: train with dtype=torch.bfloat16, or in float32 "
            "under torch.autocast with a torch.amp.GradScaler"
        )
    if dtype is None:
        if chosen[SPLIT]:
            raise ValueError(f"{SPLIT}=True needs dtype=torch.bfloat16")
        return
    if not chosen[SPLIT]:
        raise ValueError(
            f"dtype=torch.bfloat16 trains on split weights: set {SPLIT}=True (level 'O1' does), "
            "or train in float32 under torch.autocast"
        )
    if not chosen[FUSE_STEP]:
        raise ValueError(
            f"dtype=torch.bfloat16 needs {FUSE_STEP}=True: only our step updates split weights; or "
            "omit dtype, and train in float32 or under torch.autocast"
        )
