"""Times FusedAdagrad against torch's Adagrad: ``python -m benchmarks.adagrad [--save]``.

Gradients are dense, in float32; benchmarks.sparse times sparse ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import _command
from benchmarks._harness import Contender
from benchmarks._workloads import LR, WORKLOADS, Bench, timed
from fusedoptim import FusedAdagrad

BYTES = 20  # reads parameter, gradient and sum, writes parameter and sum


def contenders(bench: Bench) -> Iterator[Contender]:
    params = bench.params()
    yield bench.torch_fused_sgd()
    ours = FusedAdagrad(params, lr=LR)
    yield bench.contender("FusedAdagrad", ours.step, BYTES, "torch fused Adagrad")
    yield bench.pure_traffic()
    for way in ("fused", "foreach"):
        theirs = torch.optim.Adagrad(params, lr=LR, **{way: True})
        yield bench.contender(f"torch {way} Adagrad", theirs.step, BYTES)


if __name__ == "__main__":
    _command.run("adagrad", __doc__, timed(WORKLOADS, contenders))
