"""Times torch's small operators: ``python -m benchmarks.small_operators [--save]``.

They are those of training iterations of GPT, BERT and ResNet-50 that are neither products nor ours,
in float32 and in the shapes of :mod:`benchmarks.iteration`. Contenders are torch's operator, which
is the base, and a kernel that only moves the same bytes: what a kernel of ours could gain at most.
malloc keeps freed memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import _command
from benchmarks._harness import Contender, Report, time_with_kept_memory
from fusedoptim.raw import ElementwiseKernel, ReductionKernel

_ROUNDS = 200
_TOKENS, _WIDE, _HEADS = (512, 384), (512, 1536), (4, 128, 6, 64)
_TABLE, _SCORES, _IMAGES = (30_522, 384), (24, 128, 128), (8, 256, 32, 32)

_read: ReductionKernel = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "read_bytes")
_MOVES = {
    (0, 1): ElementwiseKernel("", "T y", "y = 0", "write_bytes"),
    (1, 1): ElementwiseKernel("T a", "T y", "y = a", "copy_bytes"),
    (2, 1): ElementwiseKernel("T a, T b", "T y", "y = a + b", "add_bytes"),
}
"""Kernels that only move bytes, by how many tensors they read and write."""


def _normalize(x: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:])


def _backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    x.requires_grad_()
    y, grad = function(x), torch.randn(x.shape)
    return lambda: torch.autograd.grad(y, x, grad, retain_graph=True)


_WORKLOADS: dict[
    str, tuple[tuple[int, ...], tuple[int, int], Callable[[Tensor], Callable[[], object]]]
] = {
    "addition": (_TOKENS, (2, 1), lambda x: lambda other=x + 1: x + other),
    "addition-images": (_IMAGES, (2, 1), lambda x: lambda other=x + 1: x + other),
    "copy-of-heads": (_HEADS, (1, 1), lambda x: lambda: x.transpose(1, 2).contiguous()),
    "fill": (_TABLE, (0, 1), lambda x: lambda: x.new_zeros(x.shape)),
    "layer-norm": (_TOKENS, (1, 1), lambda x: lambda: _normalize(x)),
    "layer-norm-backward": (_TOKENS, (2, 1), lambda x: _backward(_normalize, x)),
    "relu-images": (_IMAGES, (1, 1), lambda x: lambda: x.relu()),
    "relu-backward-images": (_IMAGES, (2, 1), lambda x: _backward(torch.relu, x)),
    "softmax": (_SCORES, (1, 1), lambda x: lambda: x.softmax(-1)),
    "softmax-backward": (_SCORES, (2, 1), lambda x: _backward(lambda x: x.softmax(-1), x)),
    "sum-of-rows": (_TOKENS, (1, 0), lambda x: lambda: x.sum(0)),
    "sum-of-rows-wide": (_WIDE, (1, 0), lambda x: lambda: x.sum(0)),
}
"""The shape, how many such tensors are read and written, and what makes the operator's call."""


def _measure(name: str, rounds: int | None) -> Report:
    shape, (reads, writes), make = _WORKLOADS[name]
    x = torch.randn(shape)
    inputs, output = [torch.randn(shape) for _ in range(reads)], torch.empty(shape)
    call = make(x)
    least = (lambda: _MOVES[reads, writes](*inputs, output)) if writes else lambda: _read(*inputs)
    moved = (reads + writes) * x.nbytes
    contenders = [Contender("torch", call, moved), Contender("the same bytes", least, moved)]
    return Report(name, time_with_kept_memory(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("small_operators", __doc__, measures)
