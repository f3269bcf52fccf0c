"""Times attention with dropout, forward and backward: ``python -m benchmarks.attention [--save]``.

Each workload is the attention of one layer with p=0.1. Contenders are torch's, which is the base,
ours, and torch's without dropout, which is another kernel. Heads are views of projections, as in
models. Workloads whose name ends in bfloat16 run under ``torch.autocast``. ``small`` runs 100
times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import _command
from benchmarks._harness import Contender, Report, repeated, time_interleaved
from fusedoptim.nn import functional

_P = 0.1
_ROUNDS = 40
_SMALL_REPEATS = 100

_WORKLOADS: dict[str, tuple[tuple[int, int, int, int], bool]] = {
    "bert": ((8, 6, 64, 64), False),
    "bert-bfloat16": ((8, 6, 64, 64), False),
    "gpt": ((4, 6, 128, 64), True),
    "gpt-bfloat16": ((4, 6, 128, 64), True),
    "long-bfloat16": ((1, 8, 1024, 64), True),
    "small": ((2, 2, 16, 16), False),
}
"""Batch, heads, length and width of a head; whether attention is causal."""


def _measure(name: str, rounds: int | None) -> Report:
    (batch, heads, length, width), is_causal = _WORKLOADS[name]
    is_short = name.endswith("bfloat16")
    dtype = torch.bfloat16 if is_short else torch.float32
    query, key, value, grad = (
        torch.randn(batch, length, heads, width).to(dtype).transpose(1, 2).requires_grad_()
        for _ in range(4)
    )

    def both_ways(function: Callable[..., Tensor], p: float) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_short):
            output = function(query, key, value, dropout_p=p, is_causal=is_causal)
        torch.autograd.grad(output, (query, key, value), grad)

    repeats = _SMALL_REPEATS if name == "small" else 1
    moved = 8 * query.nbytes * repeats  # inputs, output and gradients

    def contender(label: str, function: Callable[..., Tensor], p: float) -> Contender:
        return Contender(label, repeated(lambda: both_ways(function, p), repeats), moved)

    torchs = torch.nn.functional.scaled_dot_product_attention
    contenders = [
        contender("torch", torchs, _P),
        contender("fusedoptim", functional.scaled_dot_product_attention, _P),
        contender("torch without dropout", torchs, 0.0),
    ]
    return Report(name, time_interleaved(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("attention", __doc__, measures)
