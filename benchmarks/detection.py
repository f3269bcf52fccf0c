"""Times ROIAlign and NMS against torchvision's: ``python -m benchmarks.detection [--save]``.

ROIAlign has boxes of 16 to 224 pixels on maps of a quarter of an image of 800 x 1088, and 7 x 7
bins of 2 x 2 samples; its workloads differ in the layout of the maps. The outputs of torchvision
and ours are contiguous. NMS has boxes of 16 to 512 pixels and a threshold of 0.7; with 1,000 boxes
it runs ten times. "frozen-batch-norm" compares torchvision's module with ``batch_norm``. All need a
torchvision whose operators load.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks import _command
from benchmarks._harness import Contender, Report, repeated, time_interleaved
from fusedoptim import ops

_ROUNDS = 10
_IMAGE = (1088.0, 800.0)
_MAPS = (1, 256, 200, 272)
_GRID = (7, 0.25, 2)


def _boxes(count: int, least: float, most: float) -> Tensor:
    """Boxes within an image; side lengths are log-uniform."""
    sides = torch.empty(count, 2).uniform_(math.log(least), math.log(most)).exp()
    corners = torch.rand(count, 2) * (torch.tensor(_IMAGE) - sides)
    return torch.cat([corners, corners + sides], 1)


def _roi_align(count: int, layout: torch.memory_format, backward: bool) -> list[Contender]:
    import torchvision

    boxes = [_boxes(count, 16, 224)]
    maps = torch.randn(_MAPS).to(memory_format=layout).requires_grad_()

    def contender(label: str, function: Callable[..., Tensor]) -> Contender:
        if not backward:
            return Contender(label, lambda: function(maps.detach(), boxes, *_GRID))
        output = function(maps, boxes, *_GRID)
        grad = torch.randn_like(output)
        step = functools.partial(torch.autograd.grad, output, maps, grad, retain_graph=True)
        return Contender(label, step)

    return [
        contender("torchvision", torchvision.ops.roi_align),
        contender("fusedoptim", ops.roi_align),
    ]


def _nms(count: int) -> list[Contender]:
    import torchvision

    boxes, scores = _boxes(count, 16, 512), torch.rand(count)
    times = 10 if count < 10_000 else 1

    def contender(label: str, function: Callable[..., Tensor]) -> Contender:
        return Contender(label, repeated(lambda: function(boxes, scores, 0.7), times))

    return [contender("torchvision", torchvision.ops.nms), contender("fusedoptim", ops.nms)]


def _frozen_batch_norm() -> list[Contender]:
    import torchvision

    norm = torchvision.ops.FrozenBatchNorm2d(_MAPS[1])
    maps = torch.randn(_MAPS, requires_grad=True)
    grad = torch.randn(_MAPS)

    def ours(x: Tensor) -> Tensor:
        tensors: Any = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return torch.nn.functional.batch_norm(x, *tensors, eps=norm.eps)

    return [
        Contender(label, lambda function=function: torch.autograd.grad(function(maps), maps, grad))
        for label, function in (("torchvision", norm), ("batch_norm", ours))
    ]


_LAYOUTS = {"": torch.contiguous_format, "-channels-last": torch.channels_last}
_WORKLOADS: dict[str, Callable[[], list[Contender]]] = {
    f"roi-align{way}-{count}{layout}": functools.partial(_roi_align, count, order, way != "")
    for count in (1000, 100, 10)
    for way in ("", "-backward")
    for layout, order in _LAYOUTS.items()
}
_WORKLOADS |= {f"nms-{count}": functools.partial(_nms, count) for count in (1000, 12_000)}
_WORKLOADS["frozen-batch-norm"] = _frozen_batch_norm


def _measure(name: str, rounds: int | None) -> Report:
    return Report(name, time_interleaved(_WORKLOADS[name](), rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    _command.run("detection", __doc__, measures)
