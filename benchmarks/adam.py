"""Times FusedAdam and FusedAdamW against torch's: ``python -m benchmarks.adam [--save]``.

All are in float32; FusedAdamW is also timed with its moments in bfloat16 and in 8 bits. torchao's
optimizers with 8-bit state are in :mod:`benchmarks.adam_8bit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import _command
from benchmarks._harness import Contender
from benchmarks._workloads import LR, WORKLOADS, Bench, timed
from fusedoptim import FusedAdam, FusedAdamW

BYTES = 28  # reads parameter, gradient and two moments, writes all but the gradient
STATES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("bfloat16 state", {"state_dtype": torch.bfloat16}, 20),
    ("float8 state", {"state_dtype": "float8"}, 16),
    ("split, float8 state", {"state_dtype": "float8", "split": True}, 14),
)
"""Variants of FusedAdamW: their names, arguments, and the bytes that they move."""


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
    for name, arguments, moved in STATES:
        own = bench.params(torch.bfloat16 if "split" in arguments else torch.float32)
        step = FusedAdamW(own, lr=LR, **arguments).step
        yield bench.contender(f"FusedAdamW, {name}", step, moved, "torch fused AdamW")
    for peer in (torch.optim.Adam, torch.optim.AdamW):
        foreach = peer(params, lr=LR, foreach=True)
        yield bench.contender(f"torch foreach {peer.__name__}", foreach.step, BYTES)


if __name__ == "__main__":
    _command.run("adam", __doc__, timed(WORKLOADS, contenders))
