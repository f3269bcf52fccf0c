"""Pass: compute frozen BatchNorms with torch's BatchNorm, one operation forward and one backward.

The class of each FrozenBatchNorm2d of torchvision and detectron2 becomes
:class:`transforms.rewrites.frozen_batch_norm.FrozenBatchNorm`. For inference they are folded.
"""

from __future__ import annotations

from torch import nn

from transforms.passes.protocol import ExchangingPass, Job
from transforms.reports import Entry
from transforms.rewrites.frozen_batch_norm import FrozenBatchNorm
from transforms.tracing.modules import Kinds, frozen_batch_norms, is_plain


class FuseFrozenBatchNorm(ExchangingPass):
    """Replaces the classes of frozen BatchNorms by ours."""

    knob = "fuse_frozen_batch_norm"
    what = "one operation forward, and one backward"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes."""
        kinds = frozen_batch_norms()
        return [
            self.exchange(job, name, module, FrozenBatchNorm, _objection(module, kinds))
            for name, module in job.model.named_modules()
            if isinstance(module, kinds)
        ]


def _objection(module: nn.Module, kinds: Kinds) -> str | None:
    return None if is_plain(module, kinds) else f"{type(module).__name__} overrides its methods"
