"""Times FusedLamb: ``python -m benchmarks.lamb [--save]``.

Steps are in float32 with weight decay. torch.optim has no Lamb: the peer uses foreach functions.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import _command
from benchmarks._harness import Absent, Contender
from benchmarks._peers import ForeachLamb
from benchmarks._workloads import LR, WORKLOADS, Bench, timed
from fusedoptim import FusedLamb

# As for Adam, if the second pass finds everything in the cache; 40 if it finds nothing there.
BYTES = 28
WEIGHT_DECAY = 0.01


def contenders(bench: Bench) -> Iterator[Contender | Absent]:
    params = bench.params()
    yield bench.torch_fused_sgd()
    ours = FusedLamb(params, lr=LR, weight_decay=WEIGHT_DECAY)
    yield bench.contender("FusedLamb", ours.step, BYTES, "foreach Lamb")
    yield bench.pure_traffic()
    foreach = ForeachLamb(params, lr=LR, weight_decay=WEIGHT_DECAY)
    yield bench.contender("foreach Lamb", foreach.step, BYTES)
    yield Absent("torch fused Lamb", "torch.optim has no Lamb")


if __name__ == "__main__":
    _command.run("lamb", __doc__, timed(WORKLOADS, contenders))
