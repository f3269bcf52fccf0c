"""Times FusedAdamW(max_grad_norm=1) against clip_grad_norm_ and torch's fused AdamW.

``python -m benchmarks.clipping [--save]``, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks import _command
from benchmarks._harness import Contender
from benchmarks._workloads import BERT_BASE, LR, Bench, timed
from benchmarks.adam import BYTES
from fusedoptim import FusedAdamW

MAX_NORM = 1.0
NORM_BYTES = 4  # reads the gradient
CLIP_BYTES = NORM_BYTES + 8  # and scales it


def contenders(bench: Bench) -> Iterator[Contender]:
    params = bench.params()

    def clip_and(step: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM, foreach=True)
            step()

        return run

    peer = "clip_grad_norm_, torch fused AdamW"
    theirs = torch.optim.AdamW(params, lr=LR, fused=True)
    ours = FusedAdamW(params, lr=LR)
    clipping = FusedAdamW(params, lr=LR, max_grad_norm=MAX_NORM)
    yield bench.contender(peer, clip_and(theirs.step), CLIP_BYTES + BYTES)
    yield bench.contender("FusedAdamW(max_grad_norm=1)", clipping.step, NORM_BYTES + BYTES)
    yield bench.pure_traffic()
    yield bench.contender("clip_grad_norm_, FusedAdamW", clip_and(ours.step), CLIP_BYTES + BYTES)
    yield bench.contender("torch fused AdamW, unclipped", theirs.step, BYTES)
    yield bench.contender("FusedAdamW, unclipped", ours.step, BYTES)


if __name__ == "__main__":
    _command.run("clipping", __doc__, timed([BERT_BASE], contenders))
