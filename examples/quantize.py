"""Trains a convolutional network on handwritten digits, quantizes it, and compares the two.

Run ``python examples/quantize.py``; it takes well under a minute. The ranges of activations are
found on training images. Accuracy, agreement and time are measured on test images, and agreement
also on all images.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from digits import BATCH, Digits, load_data, positive, test_accuracy, train
from torch import Tensor, nn

from fusedoptim import FusedSGD, transforms

REQUIRED_AGREEMENT = 0.99
CALIBRATION_BATCHES = 8
RUNS = 20


@torch.no_grad()
def agreement(model: nn.Module, other: nn.Module, images: Tensor) -> float:
    """The share of images that both models put into the same class."""
    same = model(images).argmax(dim=1) == other(images).argmax(dim=1)
    return int(same.sum()) / len(same)


@torch.no_grad()
def fastest_run(model: nn.Module, images: Tensor) -> float:
    """The least time of several forward passes, in seconds."""
    seconds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        model(images)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def quantized(model: nn.Module, digits: Digits, batches: int = CALIBRATION_BATCHES) -> nn.Module:
    """The model in INT8, calibrated on some batches of training images."""
    loader = torch.split(digits.train_images, BATCH)
    result: nn.Module = transforms.quantize(model.eval(), loader, max_batches=batches)
    return result


def print_results(models: dict[str, nn.Module], digits: Digits) -> None:
    """Print accuracy and time of each model as a row of a table."""
    images = digits.test_images
    print(f"\n{'':<22}{'accuracy':>10}{'time':>12}")
    for name, model in models.items():
        milliseconds = fastest_run(model, images) * 1e3
        print(f"{name:<22}{test_accuracy(model, digits):>10.2%}{milliseconds:>9.3f} ms")


def main() -> None:
    """Train, quantize, compare, and exit with an error if the two agree too seldom."""
    parser = argparse.ArgumentParser(description="Train a network on digits, and quantize it.")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--epochs", type=positive, default=10, help="default: %(default)s")
    arguments = parser.parse_args()
    digits = load_data(arguments.seed)
    plain = train("FusedSGD", FusedSGD, digits, arguments.epochs, arguments.seed).model.eval()
    int8 = quantized(plain, digits)
    print_results(
        {
            "float32": plain,
            "float32, optimized": transforms.optimize(plain, sample_input=digits.test_images),
            "INT8": int8,
        },
        digits,
    )
    print(f"\n{transforms.report(int8)}")
    every = torch.cat([digits.train_images, digits.test_images])
    agreed = agreement(plain, int8, every)
    print(f"\nSame class in INT8 as in float32: {agreed:.2%} of {len(every)} images")
    if agreed < REQUIRED_AGREEMENT:
        sys.exit(f"error: that is less than {REQUIRED_AGREEMENT:.0%}")


if __name__ == "__main__":
    main()
