"""Pass: in training, compute the float32 products of Linears by oneDNN.

The class of each plain ``torch.nn.Linear``, and of transformers' ``Conv1D``, becomes one of
:mod:`transforms.rewrites.onednn_products`: the object, its Parameters and its hooks stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transforms.passes.protocol import ExchangingPass, Job
from transforms.reports import Entry
from transforms.rewrites import onednn_products
from transforms.rewrites.onednn_products import OneDNNLinear, OneDNNModule
from transforms.tracing.modules import objection_to_exchange, transposed_linears


class OneDNNProducts(ExchangingPass):
    """Replaces the classes of Linears; each call decides whether oneDNN computes the product."""

    knob = "onednn_products"
    what = "float32 products by oneDNN, forward and backward, if they are large"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes; entries are all Linears."""
        of_all, classes = _objection_to_all(job), _ours()
        given = onednn_products.attributes()
        return [
            self.exchange(job, name, module, ours, of_all or _objection(module, kind), **given)
            for name, module in job.model.named_modules()
            for kind, ours in classes.items()
            if isinstance(module, kind) and not isinstance(module, OneDNNModule)
        ]


def _ours() -> dict[type[nn.Module], type[OneDNNModule]]:
    """Our class for each kind; the one for transformers only if that is imported."""
    ours: dict[type[nn.Module], type[OneDNNModule]] = {nn.Linear: OneDNNLinear}
    for kind in transposed_linears():
        from transforms.rewrites.onednn_conv1d import OneDNNConv1D

        ours[kind] = OneDNNConv1D
    return ours


def _objection_to_all(job: Job) -> str | None:
    if job.options.dtype is torch.bfloat16:
        return "computes in bfloat16, for which torch itself calls oneDNN"
    return onednn_products.objection()


def _objection(module: nn.Module, kind: type[nn.Module]) -> str | None:
    if (reason := objection_to_exchange(module, (kind,))) is not None:
        return reason
    dtype: Any = module.weight.dtype
    if dtype is torch.float32:
        return None
    return f"computes in {str(dtype).removeprefix('torch.')}: torch's products stay"
