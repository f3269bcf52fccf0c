"""Trains a convolutional network on handwritten digits with torch's SGD and with FusedSGD.

Both training runs start from the same weights and use the same batches; only ``optimizer.step()``
differs. Run ``python examples/digits.py``; it takes well under a minute.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import tqdm

from fusedoptim import FusedSGD

BATCH = 64
TEST_SHARE = 0.2
REQUIRED_ACCURACY = 0.97
SMOOTHING = 10  # steps that one point of a loss curve averages


class Digits(NamedTuple):
    """Images of shape (n, 1, 8, 8), scaled to [0, 1], and their labels."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Training(NamedTuple):
    """The results of one training run."""

    label: str
    model: nn.Module
    losses: list[float]
    """Loss of each step's batch."""
    accuracies: list[float]
    """Accuracy on the test images after each epoch."""
    step_seconds: list[float]
    """Duration of each call of optimizer.step()."""


def load_data(seed: int) -> Digits:
    """Split scikit-learn's digits into training and test images."""
    bundle = load_digits()
    images = torch.from_numpy(bundle.images).float().div(16).unsqueeze(1)
    labels = torch.from_numpy(bundle.target).long()
    train, test = train_test_split(
        np.arange(len(labels)), test_size=TEST_SHARE, stratify=bundle.target, random_state=seed
    )
    return Digits(images[train], labels[train], images[test], labels[test])


def convolution(channels_in: int, channels_out: int) -> nn.Sequential:
    """A 3x3 convolution with batch normalization and ReLU."""
    return nn.Sequential(
        # No bias: the normalization would subtract it with the mean.
        nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def make_network() -> nn.Sequential:
    """Four convolutions, two poolings (8x8 to 2x2 pixels) and a linear head."""
    return nn.Sequential(
        convolution(1, 32),
        convolution(32, 32),
        nn.MaxPool2d(2),
        convolution(32, 64),
        convolution(64, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 2 * 2, 10),
    )


@torch.no_grad()
def test_accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of test images that ``model`` classifies correctly."""
    model.eval()
    predicted = model(digits.test_images).argmax(dim=1)
    return int((predicted == digits.test_labels).sum()) / len(predicted)


def timed_step(optimizer: torch.optim.Optimizer) -> float:
    """Take one step and return its duration in seconds."""
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start


def train(
    label: str, optimizer_class: type[torch.optim.SGD], digits: Digits, epochs: int, seed: int
) -> Training:
    """Train a new network; equal seeds give equal initial weights and batches."""
    torch.manual_seed(seed)
    model = make_network()
    result = Training(label, model, losses=[], accuracies=[], step_seconds=[])
    optimizer = optimizer_class(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True
    )
    steps = epochs * steps_per_epoch(digits)
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    with tqdm(total=steps, desc=f"{label:<15}", unit="step", ncols=88) as bar:
        for _ in range(epochs):
            model.train()
            for batch in torch.split(torch.randperm(len(digits.train_labels)), BATCH):
                loss = cross_entropy(model(digits.train_images[batch]), digits.train_labels[batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
                result.step_seconds.append(timed_step(optimizer))
                scheduler.step()
                result.losses.append(loss.item())
                bar.update()
            result.accuracies.append(test_accuracy(model, digits))
    return result


def steps_per_epoch(digits: Digits) -> int:
    """The number of batches, the last of which may be smaller."""
    return -(-len(digits.train_labels) // BATCH)


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    """The largest absolute difference between two networks' corresponding weights."""
    pairs = zip(a.parameters(), b.parameters())
    return max((p - q).abs().max().item() for p, q in pairs)


def print_header(digits: Digits, epochs: int, seed: int) -> None:
    """Describe the data and the network."""
    weights = list(make_network().parameters())
    print(
        f"Handwritten digits (scikit-learn): {len(digits.train_labels)} for training, "
        f"{len(digits.test_labels)} for testing, 8x8 pixels\n"
        f"Network: {sum(w.numel() for w in weights):,} weights in {len(weights)} tensors\n"
        f"Training: {epochs} x {steps_per_epoch(digits)} steps of {BATCH} images, seed {seed}, "
        f"torch threads: {torch.get_num_threads()}\n",
        flush=True,  # before the progress bars, which go to stderr
    )


def print_results(reference: Training, fused: Training) -> None:
    """Print both training runs as columns of a table, and the difference of their weights."""
    columns = (reference, fused)
    medians = [statistics.median(run.step_seconds) for run in columns]
    rows = [
        ("", [run.label for run in columns]),
        ("test accuracy", [f"{run.accuracies[-1]:.2%}" for run in columns]),
        ("loss, last steps", [f"{smoothed(run.losses)[-1]:.5f}" for run in columns]),
        ("step, median", [f"{median * 1e6:.1f} us" for median in medians]),
        ("first step", [f"{run.step_seconds[0] * 1e3:.1f} ms" for run in columns]),
    ]
    print()
    for name, cells in rows:
        print(f"{name:<16}" + "".join(f"{cell:>18}" for cell in cells))
    print(f"\nStep time, {reference.label} / {fused.label}: {medians[0] / medians[1]:.2f}")
    print(f"Largest weight difference: {largest_difference(reference.model, fused.model):.1e}")
    print("(not 0: the fused step rounds less often, and training amplifies the last bit)")


def smoothed(losses: list[float]) -> NDArray[np.float64]:
    """The moving average of ``losses`` over SMOOTHING steps, fewer than in an epoch."""
    return np.convolve(losses, np.full(SMOOTHING, 1 / SMOOTHING), mode="valid")


def save_picture(path: Path, reference: Training, fused: Training) -> None:
    """Draw both training runs' loss and test accuracy."""
    figure = Figure(figsize=(10, 4), layout="constrained")  # unlike pyplot's, needs no display
    loss_axes, accuracy_axes = figure.subplots(1, 2)
    # The curves nearly coincide: the first is wide and pale, the second thin on top of it.
    for run, color, width, alpha in (
        (reference, "tab:orange", 6.0, 0.5),
        (fused, "tab:blue", 1.5, 1.0),
    ):
        epochs = len(run.accuracies)
        losses = smoothed(run.losses)
        # Plot a point in the middle of the steps that it averages.
        at = (np.arange(len(losses)) + SMOOTHING / 2) * epochs / len(run.losses)
        style = {"label": run.label, "color": color, "linewidth": width, "alpha": alpha}
        loss_axes.plot(at, losses, **style)
        percent = [100 * a for a in run.accuracies]
        # With dots, because a single epoch is not a line.
        accuracy_axes.plot(
            range(1, epochs + 1), percent, marker="o", markersize=2 * width + 2, **style
        )
    loss_axes.set(title=f"Training loss (mean of {SMOOTHING} steps)", ylabel="cross-entropy")
    loss_axes.set_yscale("log")
    accuracy_axes.set(title="Test accuracy", ylabel="correct, %")
    accuracy_axes.axhline(
        100 * REQUIRED_ACCURACY, color="gray", linestyle="--", linewidth=1, label="required"
    )
    for axes in (loss_axes, accuracy_axes):
        axes.set_xlabel("epoch")
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def positive(text: str) -> int:
    """Parse a positive integer for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def argument_parser(description: str, output: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of both examples that draw a picture."""
    parser = argparse.ArgumentParser(description=description)
    seeded = "seed of splits, weights and batches; default: %(default)s"
    parser.add_argument("--seed", type=int, default=0, help=seeded)
    parser.add_argument("--output", type=Path, default=output, help="default: %(default)s")
    return parser


def main() -> None:
    """Train, show the results, and exit with an error if a network learned too little."""
    description = "Train a network on digits with torch's SGD and with FusedSGD, and compare."
    parser = argument_parser(description, "out/digits.png")
    parser.add_argument("--epochs", type=positive, default=10, help="default: %(default)s")
    arguments = parser.parse_args()
    digits = load_data(arguments.seed)
    print_header(digits, arguments.epochs, arguments.seed)
    reference, fused = (
        train(label, optimizer_class, digits, arguments.epochs, arguments.seed)
        for label, optimizer_class in (("torch.optim.SGD", torch.optim.SGD), ("FusedSGD", FusedSGD))
    )
    print_results(reference, fused)
    save_picture(arguments.output, reference, fused)
    print(f"Curves: {arguments.output}")
    for run in (reference, fused):
        if run.accuracies[-1] <= REQUIRED_ACCURACY:
            sys.exit(
                f"error: {run.label} reached {run.accuracies[-1]:.2%} test accuracy, "
                f"not over {REQUIRED_ACCURACY:.0%}"
            )


if __name__ == "__main__":
    main()
