"""What follows a layer in INT8: an activation that it applies, and a layer that takes its codes.

If a layer's output goes only to one activation, or through it to one other layer in INT8, the layer
knows both. It may return the 8-bit codes that the next layer would make, marked as codes. The next
layer computes with them, or with the values that they stand for. A layer whose input has no mark
makes its own codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from transforms.rewrites.fused_activation import are_observed, may_apply
from transforms.rewrites.int8_operators import Grid
from transforms.rewrites.post_ops import ACTIVATION, PostOp, post_op

FOLLOWER = "_fusedoptim_follower"
"""The key in ``vars`` of a layer (it is not a child) for the layer that is the only user of its
output."""
_MARK = "_fusedoptim_codes"
_EIGHT_BITS = 255


class Passed(NamedTuple):
    """The meaning of the codes that one layer hands to the next."""

    grid: Grid
    dtype: torch.dtype

    def values(self, codes: Tensor) -> Tensor:
        """The values of codes."""
        return (codes.to(torch.float32) - self.grid.zero_point).mul_(self.grid.scale).to(self.dtype)


def activation_of(layer: nn.Module) -> PostOp | None:
    """The activation that a layer may apply, if it has one."""
    activation = vars(layer).get(ACTIVATION)
    if activation is None or not may_apply(layer, activation):
        return None
    return post_op(activation)


def grid_of_follower(layer: nn.Module, is_activated: bool) -> Grid | None:
    """The grid of the codes that the next layer takes from this one, if it takes any."""
    follower = vars(layer).get(FOLLOWER)
    has_activation = vars(layer).get(ACTIVATION) is not None
    if follower is None or (has_activation and not is_activated):
        return None
    if follower.training or are_observed(layer, follower):
        return None
    computation = vars(follower).get("_fusedoptim_int8")
    grid: Grid | None = None if computation is None else computation.grid
    # With 7 bits the operators would have to clip.
    return grid if grid is not None and grid.largest == _EIGHT_BITS else None


def mark(codes: Any, passed: Passed) -> None:
    """Mark a tensor as codes."""
    setattr(codes, _MARK, passed)


def passed(x: Any) -> Passed | None:
    """The meaning of a tensor of codes; None for any other tensor."""
    return getattr(x, _MARK, None)
