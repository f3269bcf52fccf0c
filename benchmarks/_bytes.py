"""What only moves the bytes of AdamW's step: the least time that the step can take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedoptim.raw import ElementwiseKernel


class BytesOfAdamW:
    """Reads weights, gradients and two float32 moments, and writes all but gradients, in a launch.

    Its arrays are as long as all parameters together. It looks like an optimizer, so that what
    times optimizers can time it.
    """

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        """Allocate the arrays; there is no update, and so no ``lr``."""
        del lr
        count = sum(p.numel() for p in params)
        weights = torch.zeros(count, dtype=params[0].dtype)
        moments = [torch.zeros(count) for _ in range(2)]
        self._arrays = (weights, torch.ones_like(weights), *moments, weights, *moments)
        self._kernel = ElementwiseKernel(
            "T p, T g, float32 m, float32 v",
            "T to_p, float32 to_m, float32 to_v",
            "to_m = m + (float)g; to_v = v + (float)g; to_p = p",
            "adam_bytes",
        )
        self.state = {0: dict(zip(("exp_avg", "exp_avg_sq"), moments))}

    def step(self) -> None:
        """Move the bytes of one step."""
        self._kernel(*self._arrays)
