"""Times convolutions of small images, both ways: ``python -m benchmarks.convolution [--save]``.

The shapes are those of ResNet-50 at 128 pixels, in channels_last, with 8 and with 32 images.
Contenders are torch's convolution, which is the base, and ours as products of matrices, all three
or only the weight's gradient, whatever the pass of ``transforms.optimize`` would choose. malloc
keeps freed memory. ``small`` is one short convolution of 8 images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
    "512-1024-1-stride2-8": (512, 1024, 1, 2, 16),
    "256-256-3-8": (256, 256, 3, 1, 8),
    "1024-512-1-8": (1024, 512, 1, 1, 8),
    "256-1024-1-8": (256, 1024, 1, 1, 8),
    "128-512-1-16": (128, 512, 1, 1, 16),
    "128-128-3-16": (128, 128, 3, 1, 16),
}
"""Inputs, outputs, size of the kernel, stride, and the width of the image."""
_WORKLOADS = {
    f"{name}-{images}-{dtype}": (shape, images, getattr(torch, dtype))
    for dtype in ("bfloat16", "float32")
    for images in (8, 32)
    for name, shape in _SHAPES.items()
} | {"small": ((64, 64, 1, 1, 4), 8, torch.float32)}


def _measure(name: str, rounds: int | None) -> Report:
    (inputs, outputs, taps, stride, width), images, dtype = _WORKLOADS[name]
    padding = taps // 2
    x, weight = (
        torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
        for shape in ((images, inputs, width, width), (outputs, inputs, taps, taps))
    )
    given = x.requires_grad_(), weight.requires_grad_()
    pairs = (stride,) * 2, (padding,) * 2
    grad = torch.randn_like(functional.conv2d(*given, None, stride, padding).detach())
    moved = 3 * (x.nbytes + weight.nbytes + grad.nbytes)

    def contender(label: str, function: Callable[[], Tensor]) -> Contender:
        return Contender(label, lambda: torch.autograd.grad(function(), given, grad), moved)

    contenders = [
        contender("torch", lambda: functional.conv2d(x, weight, None, stride, padding)),
        *(
            contender(label, functools.partial(conv2d, x, weight, None, *pairs, whole=whole))
            for label, whole in (("all as products", True), ("weight's gradient", False))
        ),
    ]
    return Report(name, time_with_kept_memory(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("convolution", __doc__, measures)
