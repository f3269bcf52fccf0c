"""Parameters split in two halves: the upper 16 bits, a bfloat16, and the lower ones, the trail.

The upper half is the float32 value truncated, not rounded, so the pair is exactly that value.
Forward and backward passes see the bfloat16 half; an update reads and writes both. Two bytes and
two bytes where a bfloat16 parameter with a float32 master copy takes two and four.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim._device import new_state
from fusedoptim._tensors import TRAIL, Candidate, describe, has_shared_elements, turns


def check(optimizer: str, params: Sequence[Tensor]) -> None:
    """Raise unless all ``params`` are or can become upper halves.

    Raises:
        TypeError: a parameter is neither float32 nor bfloat16, or not strided.
        RuntimeError: parameters share memory, which a conversion would end.
    """
    for i, p in enumerate(params):
        what = f"{optimizer}: parameter {i} (shape {tuple(p.shape)})"
        if p.layout is not torch.strided:
            raise TypeError(f"{what} has layout {p.layout}, and only strided ones can be split")
        if p.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"{what} is {p.dtype}; split parameters are bfloat16, or float32 to be converted: "
                "convert the model with model.float() or model.bfloat16()"
            )
    once = list({id(p): p for p in params}.values())
    for p, turn in zip(once, turns(once)):
        if turn or has_shared_elements(p):
            raise RuntimeError(
                f"{optimizer}: a parameter of shape {tuple(p.shape)} has elements that share "
                "memory, among themselves or with another parameter; clone() it first, or give "
                "one Parameter to both modules"
            )


def check_half(optimizer: str, candidate: Candidate) -> None:
    """Raise unless a parameter that was split is a bfloat16 half still."""
    if candidate.param.dtype != torch.bfloat16:
        raise TypeError(
            f"{describe(optimizer, candidate)} was converted after it was split, which loses its "
            "lower half; convert a model before making its optimizer, or make the optimizer anew"
        )


def split_in_place(param: Tensor) -> Tensor:
    """Make a float32 ``param`` its upper half, and return the trail; a bfloat16's is zero."""
    with torch.no_grad():
        if param.dtype == torch.bfloat16:
            return new_state(param, torch.int16).zero_()
        bits = param.view(torch.int32)
        trail = new_state(param, torch.int16).copy_(bits)  # the low bits; the cast wraps
        upper = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        grad = param.grad
        param.grad = None
        param.data = upper
        if grad is not None:
            param.grad = grad.to(torch.bfloat16)
        return trail


def join(param: Tensor, trail: Tensor) -> Tensor:
    """The float32 values of which ``param`` is the upper half and ``trail`` the lower."""
    upper = param.detach().view(torch.int16).to(torch.int32) << 16
    return (upper | (trail.to(torch.int32) & 0xFFFF)).view(torch.float32)


def check_checkpoint(optimizer: str, saved: Iterable[tuple[Tensor, dict[str, Any]]]) -> None:
    """Raise unless the trails in a checkpoint are of all parameters, or of none.

    Raises:
        ValueError: a trail is missing, or of another shape or dtype.
    """
    saved = list(saved)
    if not any(TRAIL in state for _, state in saved):
        return
    for i, (p, state) in enumerate(saved):
        trail = state.get(TRAIL)
        if trail is None:
            raise ValueError(
                f"{optimizer}: the checkpoint has lost the {TRAIL!r} of parameter {i} (shape "
                f"{tuple(p.shape)}), the lower half of its values; load a whole checkpoint"
            )
        if trail.shape != p.shape or trail.dtype != torch.int16:
            raise ValueError(
                f"{optimizer}: the {TRAIL!r} of parameter {i} in the checkpoint is {trail.dtype} "
                f"of shape {tuple(trail.shape)}, and the parameter's is torch.int16 of shape "
                f"{tuple(p.shape)}; load the checkpoint of the same model"
            )
