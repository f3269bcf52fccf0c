"""Times SplitSGD and shows its memory: ``python -m benchmarks.split_sgd [--save]``.

Steps have momentum, on bfloat16 parameters and gradients; the base uses float32. torch.optim has no
such optimizer: the peer is torch's fused SGD on a float32 master copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import _command
from benchmarks._fresh import measured
from benchmarks._harness import Absent, Contender
from benchmarks._output import Table
from benchmarks._peers import MasterSGD
from benchmarks._workloads import LR, MOMENTUM, SGD_BYTES, WORKLOADS, Bench, timed
from fusedoptim import SplitSGD

BYTES = 18  # reads two halves, a gradient of 2 bytes and momentum, writes all but the gradient
MASTER_BYTES = (
    6 + SGD_BYTES + 6
)  # converts the gradient to float32, and the master copy to bfloat16
PEER = "torch fused SGD, float32 master"
MEMORY = "memory"


def contenders(bench: Bench) -> Iterator[Contender | Absent]:
    params = bench.params(torch.bfloat16)
    yield bench.torch_fused_sgd()
    ours = SplitSGD(params, lr=LR, momentum=MOMENTUM)
    yield bench.contender("SplitSGD", ours.step, BYTES, PEER)
    yield bench.pure_traffic()
    yield bench.contender(PEER, MasterSGD(params, lr=LR, momentum=MOMENTUM).step, MASTER_BYTES)
    yield Absent("torch fused SplitSGD", "torch.optim has none")


def memory(rounds: int | None) -> Table:
    """Measure bytes per weight of both; further rounds would be identical."""
    del rounds
    model = "bert-base"
    rows = []
    for name, way in (("SplitSGD", "split"), (PEER, "master")):
        facts = measured("split_memory", way, model)
        rows.append([name, *(f"{facts[key]:.2f}" for key in ("weights", "tensors", "peak"))])
    header = ["bytes per weight", "weight", "with gradient and momentum", "peak resident"]
    return Table(f"memory, {model}", header, rows)


if __name__ == "__main__":
    _command.run("split_sgd", __doc__, {**timed(WORKLOADS, contenders), MEMORY: memory})
