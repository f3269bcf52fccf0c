"""Times FusedAdam and FusedAdamW against torch's: ``python -m benchmarks.adam [--save]``.

In float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import _command
from benchmarks._harness import Contender
from benchmarks._workloads import LR, WORKLOADS, Bench, timed
from fusedoptim import FusedAdam, FusedAdamW

BYTES = 28  # reads parameter, gradient and two moments, writes all but the gradient


def contenders(bench: Bench) -> Iterator[Contender]:
    params = bench.params()
    yield bench.torch_fused_sgd()
    yield bench.contender("FusedAdam", FusedAdam(params, lr=LR).step, BYTES, "torch fused Adam")
    yield bench.pure_traffic()
    fused = torch.optim.Adam(params, lr=LR, fused=True)
    yield bench.contender("torch fused Adam", fused.step, BYTES)
    yield bench.contender("FusedAdamW", FusedAdamW(params, lr=LR).step, BYTES, "torch fused AdamW")
    fused = torch.optim.AdamW(params, lr=LR, fused=True)
    yield bench.contender("torch fused AdamW", fused.step, BYTES)
    for peer in (torch.optim.Adam, torch.optim.AdamW):
        foreach = peer(params, lr=LR, foreach=True)
        yield bench.contender(f"torch foreach {peer.__name__}", foreach.step, BYTES)


if __name__ == "__main__":
    _command.run("adam", __doc__, timed(WORKLOADS, contenders))
