"""Times dropout, forward and backward: ``python -m benchmarks.dropout [--save]``.

Each workload is one shape, layout and dtype with p=0.1. Contenders are torch's dropout, which is
the base, ours, and two copies of the same tensor, which move as many bytes. Results are new
tensors, as in training. ``small`` runs 100 times; ``gpt-alpha`` is AlphaDropout.
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
_SMALL = (64, 128)
_SMALL_REPEATS = 100

_WORKLOADS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "gpt": ((4, 128, 1536), torch.float32),
    "gpt-bfloat16": ((4, 128, 1536), torch.bfloat16),
    "gpt-alpha": ((4, 128, 1536), torch.float32),
    "gpt-attention": ((4, 6, 128, 128), torch.float32),
    "bert": ((8, 64, 384), torch.float32),
    "bert-bfloat16": ((8, 64, 384), torch.bfloat16),
    "images-channels-last": ((8, 256, 28, 28), torch.float32),
    "small": (_SMALL, torch.float32),
}


def _both_ways(function: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    torch.autograd.grad(function(x), x, grad)


def _measure(name: str, rounds: int | None) -> Report:
    shape, dtype = _WORKLOADS[name]
    x, grad = (torch.randn(shape).to(dtype) for _ in range(2))
    if name.endswith("channels-last"):
        x, grad = (t.to(memory_format=torch.channels_last) for t in (x, grad))
    x.requires_grad_()
    repeats = _SMALL_REPEATS if shape == _SMALL else 1
    moved = 4 * x.nbytes * repeats

    def contender(label: str, function: Callable[[Tensor], Tensor]) -> Contender:
        step = repeated(lambda: _both_ways(function, x, grad), repeats)
        return Contender(label, step, moved)

    def copy_twice() -> None:
        grad.clone()
        grad.clone()

    function = "alpha_dropout" if name.endswith("alpha") else "dropout"
    torchs, ours = getattr(torch.nn.functional, function), getattr(functional, function)
    contenders = [
        contender("torch", lambda x: torchs(x, _P, True)),
        contender("fusedoptim", lambda x: ours(x, _P, True)),
        Contender("copied twice", repeated(copy_twice, repeats), moved),
    ]
    return Report(name, time_interleaved(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("dropout", __doc__, measures)
