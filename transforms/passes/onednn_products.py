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
from transforms.rewrites import exchanged_class, onednn_products
from transforms.rewrites.onednn_products import OneDNNLinear, OneDNNModule
from transforms.tracing.modules import (
    Kinds,
    objection_to_exchange,
    transposed_linears,
)


class OneDNNProducts(ExchangingPass):
    """Replaces the classes of Linears; each call decides whether oneDNN computes the product."""

    knob = "onednn_products"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes; entries are all Linears."""
        ours = _ours()
        kinds = tuple(ours)
        of_all = _objection_to_all(job)
        entries = []
        for name, module in job.model.named_modules():
            if isinstance(module, OneDNNModule) or not isinstance(module, kinds):
                continue
            reason = of_all or _objection(module, kinds) or job.asked.objection(module)
            if reason is None:
                exchanged_class.exchange(
                    module, ours[type(module)], job.undo, **onednn_products.attributes()
                )
            what = "float32 products by oneDNN, forward and backward, if they are large"
            entries.append(Entry(name, reason or what, done=reason is None))
        return entries


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


def _objection(module: nn.Module, kinds: Kinds) -> str | None:
    if (reason := objection_to_exchange(module, kinds)) is not None:
        return reason
    dtype: Any = module.weight.dtype
    if dtype is torch.float32:
        return None
    return f"computes in {str(dtype).removeprefix('torch.')}: torch's products stay"
