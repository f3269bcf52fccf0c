"""GPT-2's Linear with a transposed weight, from transformers; import it only if that is there."""

from __future__ import annotations

from torch import Tensor
from transformers.pytorch_utils import Conv1D

from fusedoptim.ops._linear import linear
from transforms.rewrites.for_training import is_computed
from transforms.rewrites.onednn_products import OneDNNModule, is_served


class OneDNNConv1D(OneDNNModule, Conv1D):
    """:math:`y = x W + b` by oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute as ``transformers.pytorch_utils.Conv1D`` does."""
        if self.training and not is_computed(self):
            weight = self.weight.t()
            if is_served(x, weight, self.bias, self._fusedoptim_least_products):
                return linear(x, weight, self.bias)
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]  # untyped in transformers
        return result
