"""Pass: in training, compute convolutions over small images as products of matrices.

The class of each plain ``torch.nn.Conv2d`` with a large weight becomes that of
:mod:`transforms.rewrites.conv_as_matmul`: the object, its Parameters and its hooks stay.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from transforms.passes.protocol import ExchangingPass, Job
from transforms.reports import Entry
from transforms.rewrites import conv_as_matmul, exchanged_class
from transforms.rewrites.conv_as_matmul import MatmulConv2d
from transforms.tracing.modules import COMPUTED, has_computed_tensors, has_replaced_methods


class ConvAsMatmul(ExchangingPass):
    """Replaces the classes of convolutions; each call decides by the size of its images."""

    knob = "conv_as_matmul"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes; entries are all 2-d convolutions."""
        entries = []
        for name, module in job.model.named_modules():
            if isinstance(module, MatmulConv2d) or not isinstance(module, nn.Conv2d):
                continue
            reason = _objection(module, job.options.dtype)
            if reason is None:
                exchanged_class.exchange(module, MatmulConv2d, job.undo)
            what = "small images as products of matrices, forward and backward"
            entries.append(Entry(name, reason or what, done=reason is None))
        return entries


def _objection(module: nn.Conv2d, cast_to: torch.dtype | None) -> str | None:
    if has_computed_tensors(module):
        return COMPUTED
    if type(module) is not nn.Conv2d or has_replaced_methods(module):
        return f"overrides its methods: {type(module).__name__} may differ"
    weight = module.weight
    if type(weight) not in (Tensor, nn.Parameter):
        return f"has a weight of class {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"is on {weight.device.type}: only the CPU's convolutions are slow for small images"
    if (reason := conv_as_matmul.objection_to_kind(module)) is not None:
        return reason
    dtype = weight.dtype if cast_to is None else cast_to
    if not conv_as_matmul.most_pixels(dtype, weight.numel()):
        name = str(dtype).removeprefix("torch.")
        return f"computes in {name}, in which products are no faster on this processor"
    return None
