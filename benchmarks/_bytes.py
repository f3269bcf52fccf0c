"""A kernel that only moves the bytes of AdamW's step: the least time that the step can take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedoptim.raw import ElementwiseKernel

_KERNELS = {
    torch.float32: ElementwiseKernel(
        "T p, U g, float32 m, float32 v",
        "T to_p, float32 to_m, float32 to_v",
        "to_m = m + (float)g; to_v = v + (float)g; to_p = p",
        "adam_bytes",
    ),
    torch.uint8: ElementwiseKernel(
        "T p, U g, uint8 m, uint8 v",
        "T to_p, uint8 to_m, uint8 to_v",
        "to_m = m + ((float)g > 0); to_v = v + ((float)g > 0); to_p = p",
        "adam_float8_bytes",
    ),
}
"""The kernels, by the dtype of the moments."""


class BytesOfAdamW:
    """Reads weights, gradients and two moments, and writes all but gradients, in one launch.

    Its arrays are as long as all parameters together. It has an optimizer's interface, so that the
    code that times optimizers can time it.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float,
        moments: str = "float32",
        gradients: str | None = None,
    ) -> None:
        """Allocate the arrays; there is no update, and so no ``lr``.

        ``moments`` is the dtype of the moments: "float32", or "uint8" for those of "float8" state.
        The scales of that state, another 0.06 bytes a weight, are left out. ``gradients`` is the
        dtype of the gradients if it is not that of ``params``: "bfloat16" for split weights, whose
        halves take as many bytes as float32.
        """
        del lr
        count = sum(p.numel() for p in params)
        weights = torch.zeros(count, dtype=params[0].dtype)
        dtype = getattr(torch, moments)
        m, v = (torch.zeros(count, dtype=dtype) for _ in range(2))
        grads = torch.ones(count, dtype=getattr(torch, gradients) if gradients else weights.dtype)
        self._arrays = (weights, grads, m, v, weights, m, v)
        self._kernel = _KERNELS[dtype]
        self.state = {0: {"exp_avg": m, "exp_avg_sq": v}}

    def step(self) -> None:
        """Move the bytes of one step."""
        self._kernel(*self._arrays)
