"""A frozen BatchNorm that computes by torch's own BatchNorm: one operation in each direction."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class FrozenBatchNorm(nn.Module):
    """FrozenBatchNorm2d of torchvision or detectron2, whose object, buffers and hooks stay."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """Normalize with the statistics in the buffers."""
        statistics = self.running_mean, self.running_var
        return nn.functional.batch_norm(x, *statistics, self.weight, self.bias, eps=self.eps)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if "num_batches_tracked" not in self._buffers:  # as torchvision's, of a BatchNorm's state
            state_dict.pop(f"{prefix}num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """The channels, and ``eps``."""
        return f"{self.running_mean.numel()}, eps={self.eps}"
