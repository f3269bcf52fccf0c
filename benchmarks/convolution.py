"""Times convolutions of small images, both ways: ``python -m benchmarks.convolution [--save]``.

The shapes are those of ResNet-50 at 128 pixels, and of its last blocks at 224, in channels_last,
with 8 and with 32 images.
Contenders are torch's convolution, which is the base, and ours as products of matrices, whatever
the pass of ``transforms.optimize`` would choose. The end of a workload's name says what is timed:
everything, the output alone, or the gradient of the input or of the weight. malloc keeps freed
memory. ``small`` is one short convolution of 8 images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import _command
from benchmarks._harness import Contender, Report, time_with_kept_memory
from fusedoptim.ops._conv2d import conv2d

_ROUNDS = 20
_SHAPES = {
    "1024-2048-1-stride2-4": (1024, 2048, 1, 2, 8),
    "512-512-3-4": (512, 512, 3, 1, 4),
    "512-512-3-stride2-4": (512, 512, 3, 2, 8),
    "512-2048-1-4": (512, 2048, 1, 1, 4),
    "2048-512-1-4": (2048, 512, 1, 1, 4),
    "1024-2048-1-stride2-7": (1024, 2048, 1, 2, 14),
    "512-512-3-7": (512, 512, 3, 1, 7),
    "512-512-3-stride2-7": (512, 512, 3, 2, 14),
    "512-2048-1-7": (512, 2048, 1, 1, 7),
    "2048-512-1-7": (2048, 512, 1, 1, 7),
    "512-1024-1-stride2-8": (512, 1024, 1, 2, 16),
    "256-256-3-8": (256, 256, 3, 1, 8),
    "256-256-3-stride2-8": (256, 256, 3, 2, 16),
    "1024-512-1-8": (1024, 512, 1, 1, 8),
    "256-1024-1-8": (256, 1024, 1, 1, 8),
    "1024-256-1-8": (1024, 256, 1, 1, 8),
    "128-512-1-16": (128, 512, 1, 1, 16),
    "128-128-3-16": (128, 128, 3, 1, 16),
}
"""Inputs, outputs, size of the kernel, stride, and the width of the image."""
_PARTS = {"all": ("input", "weight"), "forward": (), "input": ("input",), "weight": ("weight",)}
"""What is timed: everything, the output alone, or one gradient alone; and whose gradients."""
_WORKLOADS = {
    f"{name}-{images}-{dtype}-{part}": (shape, images, getattr(torch, dtype), part)
    for part in _PARTS
    for dtype in ("bfloat16", "float32")
    for images in (8, 32)
    for name, shape in _SHAPES.items()
} | {"small": ((64, 64, 1, 1, 4), 8, torch.float32, "all")}


def _measure(name: str, rounds: int | None) -> Report:
    (inputs, outputs, taps, stride, width), images, dtype, part = _WORKLOADS[name]
    padding = taps // 2
    x, weight = (
        torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for shape in ((images, inputs, width, width), (outputs, inputs, taps, taps))
    )
    tensors = {"input": x, "weight": weight}
    given = [tensors[which].requires_grad_() for which in _PARTS[part]]
    ways = {
        "torch": lambda: functional.conv2d(x, weight, None, stride, padding),
        "fusedoptim": lambda: conv2d(x, weight, None, (stride,) * 2, (padding,) * 2),
    }
    grad = torch.randn_like(ways["torch"]().detach())
    moved = (3 if part == "all" else 1) * (x.nbytes + weight.nbytes + grad.nbytes)

    def timed(convolve: Callable[[], Tensor]) -> Callable[[], Any]:
        if part == "all":
            return lambda: torch.autograd.grad(convolve(), given, grad)
        if part == "forward":
            return convolve
        output = convolve()
        return lambda: torch.autograd.grad(output, given, grad, retain_graph=True)

    contenders = [Contender(label, timed(way), moved) for label, way in ways.items()]
    return Report(name, time_with_kept_memory(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("convolution", __doc__, measures)
