"""Pass: in training, compute convolutions over small images as products of matrices.

The class of each plain ``torch.nn.Conv2d`` with a large weight becomes that of
:mod:`transforms.rewrites.conv_as_matmul`: the object, its Parameters and its hooks stay.
"""

from __future__ import annotations

import torch
from torch import nn

from transforms.passes.protocol import ExchangingPass, Job
from transforms.reports import Entry
from transforms.rewrites import conv_as_matmul
from transforms.rewrites.conv_as_matmul import MatmulConv2d
from transforms.tracing.modules import objection_to_exchange


class ConvAsMatmul(ExchangingPass):
    """Replaces the classes of convolutions; each call decides by the size of its images."""

    knob = "conv_as_matmul"
    what = "small images as products of matrices, forward and backward"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes; entries are all 2-d convolutions."""
        return [
            self.exchange(job, name, module, MatmulConv2d, _objection(module, job.options.dtype))
            for name, module in job.model.named_modules()
            if isinstance(module, nn.Conv2d) and not isinstance(module, MatmulConv2d)
        ]


def _objection(module: nn.Conv2d, cast_to: torch.dtype | None) -> str | None:
    reason = objection_to_exchange(module, (nn.Conv2d,)) or conv_as_matmul.objection_to_kind(module)
    if reason is not None:
        return reason
    dtype = module.weight.dtype if cast_to is None else cast_to
    if not any(conv_as_matmul.limits(dtype, module.kernel_size)):
        name = str(dtype).removeprefix("torch.")
        return f"computes in {name}, in which products are no faster on this processor"
    return None
