"""Pass: compute frozen BatchNorms with torch's BatchNorm, one operation forward and one backward.

The class of each FrozenBatchNorm2d of torchvision and detectron2 becomes
:class:`transforms.rewrites.frozen_batch_norm.FrozenBatchNorm`. For inference they are folded.
"""

from __future__ import annotations

from transforms.passes.protocol import ExchangingPass, Job
from transforms.reports import Entry
from transforms.rewrites import exchanged_class
from transforms.rewrites.frozen_batch_norm import FrozenBatchNorm
from transforms.tracing.modules import frozen_batch_norms, has_replaced_methods


class FuseFrozenBatchNorm(ExchangingPass):
    """Replaces the classes of frozen BatchNorms by ours."""

    knob = "fuse_frozen_batch_norm"

    def run(self, job: Job) -> list[Entry]:
        """Replace classes."""
        kinds = frozen_batch_norms()
        entries = []
        for name, module in job.model.named_modules():
            if not isinstance(module, kinds):
                continue
            if type(module) not in kinds or has_replaced_methods(module):
                reason: str | None = f"{type(module).__name__} overrides its methods"
            else:
                reason = job.asked.objection(module)
            if reason is None:
                exchanged_class.exchange(module, FrozenBatchNorm, job.undo)
            what = "one operation forward, and one backward"
            entries.append(Entry(name, reason or what, done=reason is None))
        return entries
