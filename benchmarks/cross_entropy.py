"""Times cross-entropy, forward and backward: ``python -m benchmarks.cross_entropy [--save]``.

Each workload is a number of rows, a number of classes and a dtype. Contenders are torch's function,
which is the base, ours, and a copy of the logits, which moves two thirds of the bytes. 16-bit
logits run under autocast, where torch's function copies them to float32 first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import _command
from benchmarks._harness import Contender, Report, time_interleaved
from fusedoptim.nn import functional

_ROUNDS = 40

_WORKLOADS: dict[str, tuple[int, int, torch.dtype]] = {
    "gpt": (512, 20_000, torch.float32),
    "gpt-bfloat16": (512, 20_000, torch.bfloat16),
    "gpt2-bfloat16": (512, 50_257, torch.bfloat16),
    "imagenet": (256, 1000, torch.float32),
}


def _measure(name: str, rounds: int | None) -> Report:
    rows, classes, dtype = _WORKLOADS[name]
    logits = torch.randn(rows, classes).to(dtype).requires_grad_()
    target = torch.randint(classes, (rows,))
    moved = 3 * logits.nbytes  # read twice, and a gradient written

    def contender(label: str, function: Callable[[Tensor, Tensor], Tensor]) -> Contender:
        def both_ways() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = function(logits, target)
            torch.autograd.grad(loss, logits)

        return Contender(label, both_ways, moved)

    contenders = [
        contender("torch", torch.nn.functional.cross_entropy),
        contender("fusedoptim", functional.cross_entropy),
        Contender("copied", logits.detach().clone, moved * 2 // 3),
    ]
    return Report(name, time_interleaved(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("cross_entropy", __doc__, measures)
