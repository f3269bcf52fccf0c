"""Pass: in training, compute the float32 products of Linears by oneDNN.

The class of each plain ``torch.nn.Linear``, and of transformers' ``Conv1D``, becomes one of
:mod:`transforms.rewrites.onednn_products`: the object, its Parameters and its hooks stay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transforms.passes.protocol import ExchangingPass, Job
from transforms.reports import Entry
from transforms.rewrites import exchanged_class, onednn_products
from transforms.rewrites.onednn_products import OneDNNLinear, OneDNNModule
from transforms.tracing.modules import (
    COMPUTED,
    Kinds,
    has_computed_tensors,
    has_replaced_methods,
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
            reason = of_all or _objection(module, kinds)
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
    if has_computed_tensors(module):
        return COMPUTED
    if type(module) not in kinds or has_replaced_methods(module):
        return f"overrides its methods: {type(module).__name__} may differ"
    weight = module.weight
    if type(weight) not in (Tensor, nn.Parameter):
        return f"has a weight of class {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"is on {weight.device.type}: oneDNN's products are for the CPU"
    if weight.dtype is not torch.float32:
        return f"computes in {str(weight.dtype).removeprefix('torch.')}: torch's products stay"
    return None
