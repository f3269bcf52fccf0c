"""Runs and trains a detector of torchvision, plain and on our operators, and compares times.

Run ``python examples/detection.py``, with ``--small`` for a few seconds. Weights and images are
random, as nothing is downloaded. It needs ``pip install torchvision`` in the build for your torch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.ops import FrozenBatchNorm2d

from fusedoptim import ops, transforms

CLASSES = 5
FEW = {f"rpn_{when}_nms_top_n_{mode}": 60 for when in ("pre", "post") for mode in ("train", "test")}
"""Options that limit the boxes that a small model looks at."""


def size_of_images(small: bool) -> tuple[int, int]:
    """The height and width."""
    return (64, 80) if small else (600, 800)


def detector(small: bool) -> nn.Module:
    """Faster R-CNN on a ResNet-50, or on a ResNet-18, with frozen norms as in fine-tuning."""
    backbone = resnet_fpn_backbone(
        backbone_name="resnet18" if small else "resnet50",
        weights=None,
        norm_layer=FrozenBatchNorm2d,
        trainable_layers=3,
    )
    height, width = size_of_images(small)
    few = FEW if small else {}
    return FasterRCNN(backbone, CLASSES, min_size=height, max_size=width, **few)


def batch(small: bool, count: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images of noise with bright rectangles, and the rectangles' positions."""
    height, width = size_of_images(small)
    images, targets = [], []
    for _ in range(count):
        image = 0.1 * torch.rand(3, height, width)
        sides = torch.randint(20, height // 2, (4, 2))
        corners = (torch.rand(4, 2) * (torch.tensor([width, height]) - sides)).int()
        boxes = torch.cat([corners, corners + sides], 1)
        for x1, y1, x2, y2 in boxes.tolist():
            image[:, y1:y2, x1:x2] += torch.rand(3, 1, 1)
        images.append(image)
        targets.append({"boxes": boxes.float(), "labels": torch.randint(1, CLASSES, (4,))})
    return images, targets


def in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The fastest run of each function, in seconds, after an uncounted one; runs alternate."""
    fastest = dict.fromkeys(calls, float("inf"))
    for k in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if k:
                fastest[name] = min(fastest[name], time.perf_counter() - start)
    return fastest


def infer(model: nn.Module, images: list[Tensor], ours: bool) -> list[dict[str, Tensor]]:
    """The model's detections."""
    with ops.replace_torchvision() if ours else contextlib.nullcontext(), torch.inference_mode():
        found: list[dict[str, Tensor]] = model(images)
    return found


def train(model: nn.Module, optimizer: Any, data: Any, ours: bool) -> float:
    """One step; return the loss."""
    with ops.replace_torchvision() if ours else contextlib.nullcontext():
        loss = sum(model(*data).values())
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    return float(loss.detach())


def main() -> None:
    """Compare inference and training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model and images")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, of which the fastest")
    args = parser.parse_args()
    small, rounds = args.small, args.rounds
    torch.manual_seed(0)
    plain = detector(small).eval()
    images, targets = batch(small, 2)

    optimized = transforms.optimize(copy.deepcopy(plain), auto_channels_last=True)
    print(transforms.report(optimized))
    with torch.inference_mode():
        features = [model.backbone(torch.stack(images))["0"] for model in (plain, optimized)]
    off = float((features[0] - features[1]).abs().max() / features[0].abs().max())
    found = [infer(plain, images, False), infer(plain, images, True)]
    for before, after in zip(*found):
        torch.testing.assert_close(after["boxes"], before["boxes"], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(after["scores"], before["scores"], rtol=1e-3, atol=1e-4)
    print(f"\nfeatures differ by {off:.1e} of the largest; the operators find the same boxes\n")

    table = {
        "inference, one image": in_turn(
            {
                "plain": lambda: infer(plain, images[:1], False),
                "operators": lambda: infer(plain, images[:1], True),
                "all": lambda: infer(optimized, images[:1], True),
            },
            rounds,
        )
    }
    trained = [copy.deepcopy(plain).train() for _ in range(3)]
    sgd = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in trained]
    ours, our_sgd = transforms.optimize(trained[2], sgd[2], inplace=True, auto_channels_last=True)
    data = images, targets
    table["training, two images"] = in_turn(
        {
            "plain": lambda: train(trained[0], sgd[0], data, False),
            "operators": lambda: train(trained[1], sgd[1], data, True),
            "all": lambda: train(ours, our_sgd, data, True),
        },
        rounds,
    )
    print(f"{'':22}{'plain':>10}{'operators':>12}{'all':>10}{'ratio':>8}")
    for name, seconds in table.items():
        times = "".join(f"{1e3 * seconds[k]:>{w}.0f} ms" for k, w in zip(seconds, (7, 9, 7)))
        print(f"{name:22}{times}{seconds['all'] / seconds['plain']:>8.2f}")


if __name__ == "__main__":
    main()
