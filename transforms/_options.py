"""The knobs of :func:`transforms.optimize`: IPEX's names, defaults and levels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

LEVELS: dict[str, dict[str, bool]] = {
    "O0": {
        "conv_bn_folding": False,
        "linear_bn_folding": False,
        "replace_dropout_with_identity": False,
        "split_master_weight_for_bf16": False,
        "fuse_update_step": False,
        "auto_channels_last": False,
    },
    "O1": {
        "conv_bn_folding": True,
        "linear_bn_folding": True,
        "replace_dropout_with_identity": True,
        "split_master_weight_for_bf16": True,
        "fuse_update_step": True,
        "auto_channels_last": True,
    },
}
INFERENCE = ("conv_bn_folding", "linear_bn_folding", "replace_dropout_with_identity")
TRAINING = ("split_master_weight_for_bf16", "fuse_update_step")

IPEX_ONLY = {
    "weights_prepack": "weights stay torch tensors of their own shape",
    "graph_mode": "use torch.compile on the optimized model",
    "optimize_lstm": "torch's LSTM is used as it is",
    "concat_linear": "Linears stay the modules they are",
    "auto_kernel_selection": "torch chooses its kernels",
}
"""What IPEX had and this has not, and what happens instead."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Options(NamedTuple):
    """What a call asks for, defaults filled in."""

    dtype: torch.dtype | None
    """to cast to: bfloat16 or float16; None casts nothing."""
    knobs: Mapping[str, bool]
    explicit: frozenset[str]
    """knobs that the call itself turned on."""


def resolve(
    level: str, dtype: torch.dtype | None, is_training: bool, knobs: Mapping[str, bool | None]
) -> Options:
    """Fill in the level's defaults, and see that what was asked for can be had.

    Args:
        level: "O0" or "O1".
        dtype: float32 and None cast nothing.
        is_training: the model's mode.
        knobs: True, False, or None for the level's default.

    Raises:
        TypeError: a knob that is no bool, a dtype that is none.
        ValueError: an unknown level or dtype, a knob of the other mode, or two that exclude each
            other.
        NotImplementedError: a knob of IPEX's that we have not.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is unknown; it is 'O0' (what is asked for) or 'O1'")
    _check_dtype(dtype)
    for name, value in knobs.items():
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name}={value!r} is neither True nor False nor None")
    for name, instead in IPEX_ONLY.items():
        if knobs.get(name):
            raise NotImplementedError(
                f"{name}=True: IPEX's {name} does not exist here ({instead}); leave it away"
            )
    other, mode = (INFERENCE, "eval") if is_training else (TRAINING, "train")
    for name in other:
        if knobs.get(name):
            now = "training" if is_training else "eval"
            raise ValueError(
                f"{name}=True is for a model in {mode} mode, and this one is in {now} mode: "
                f"call model.{mode}() first, or leave it away"
            )
    low = dtype if dtype in (torch.bfloat16, torch.float16) else None
    chosen = {
        name: default if knobs.get(name) is None else bool(knobs[name])
        for name, default in LEVELS[level].items()
    }
    for name in other:
        chosen[name] = False
    if is_training:
        _check_training(low, chosen, knobs)
    explicit = frozenset(name for name in chosen if knobs.get(name))
    return Options(low, chosen, explicit)


def _check_dtype(dtype: Any) -> None:
    if dtype is None or dtype in _DTYPES:
        return
    choices = "torch.bfloat16, torch.float16, torch.float32 or None"
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r} is no torch.dtype; it is {choices}")
    raise ValueError(f"dtype={dtype} cannot be cast to; it is {choices}")


def _check_training(
    dtype: torch.dtype | None, chosen: dict[str, bool], knobs: Mapping[str, bool | None]
) -> None:
    """See that the knobs for training agree, and turn off splitting where it has no part."""
    split = "split_master_weight_for_bf16"
    if dtype == torch.float16:
        raise ValueError(
            "dtype=torch.float16 is for inference: train with dtype=torch.bfloat16, or in float32 "
            "under torch.autocast with a torch.amp.GradScaler"
        )
    if dtype is None:
        if knobs.get(split):
            raise ValueError(f"{split}=True needs dtype=torch.bfloat16")
        chosen[split] = False
        return
    if not chosen[split]:
        raise ValueError(
            f"dtype=torch.bfloat16 trains on split weights: set {split}=True (level 'O1' does), "
            "or train in float32 under torch.autocast"
        )
    if not chosen["fuse_update_step"]:
        raise ValueError(f"{split} needs fuse_update_step=True: only our step updates both halves")
