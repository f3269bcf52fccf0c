"""Workloads to measure malloc's behavior; in most of them shapes change all the time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset

from benchmarks._models import resnet50
from benchmarks._training import LR, gpt, new_gpt

THREADS, WORKERS, CLASSES = 4, 2, 10


def training(seed: int) -> Iterator[None]:
    """Train the GPT of :mod:`benchmarks._training` on 1 to 4 sequences of 16 to 128 tokens."""
    model = gpt().model.train()
    yield from _trained_gpt(model, 20_000, 4, random.Random(seed))


def threads(seed: int) -> Iterator[None]:
    """Train a small GPT for each thread; whichever thread is free takes the next model."""
    torch.set_num_threads(1)
    words = 5000
    models = [new_gpt(words, layers=2, width=128, heads=4) for _ in range(THREADS)]
    runs = [
        _trained_gpt(model, words, 8, random.Random(seed + i)) for i, model in enumerate(models)
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        while True:
            list(pool.map(next, runs))
            yield


def _trained_gpt(model: nn.Module, words: int, most: int, shapes: random.Random) -> Iterator[None]:
    optimizer = AdamW(model.parameters(), lr=LR, fused=True)
    while True:
        tokens = torch.randint(words, (shapes.randint(1, most), shapes.randint(17, 129)))
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


class _Images(Dataset[tuple[Tensor, int]]):
    """Random images, scaled to a size while they are loaded; an index is (number, size)."""

    def __getitem__(self, index: tuple[int, int]) -> tuple[Tensor, int]:
        number, size = index
        image = torch.randn(1, 3, 2 * size, 2 * size)
        return interpolate(image, size=(size, size))[0], number % CLASSES


def _batches(seed: int) -> Iterator[list[tuple[int, int]]]:
    """Indices of 1 to 16 images of 32 to 128 pixels."""
    shapes = random.Random(seed)
    while True:
        size = shapes.randrange(32, 129, 4)
        yield [(number, size) for number in range(shapes.randint(1, 16))]


def loaded(seed: int) -> Iterator[None]:
    """Train a convolutional network on batches from a DataLoader's workers."""

    def block(channels_in: int, channels: int) -> list[nn.Module]:
        convolution = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)]

    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES)]
    model = nn.Sequential(*block(3, 32), *block(32, 64), *block(64, 128), *pooled)
    optimizer = AdamW(model.parameters(), lr=LR, fused=True)
    loader = DataLoader(_Images(), batch_sampler=_batches(seed), num_workers=WORKERS)  # type: ignore[arg-type]  # an endless iterator has no length
    for images, labels in loader:
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def inference(_: int) -> Iterator[None]:
    """Run ResNet-50 on 16 images."""
    model, images = resnet50().eval(), torch.randn(16, 3, 224, 224)
    with torch.no_grad():
        while True:
            model(images)
            yield


class Workload(NamedTuple):
    """An endless run with shapes from a seed, and how many of its iterations to measure."""

    run: Callable[[int], Iterator[None]]
    iterations: int


WORKLOADS = {
    "GPT": Workload(training, 1000),
    f"CNN, {WORKERS} DataLoader workers": Workload(loaded, 1000),
    f"small GPTs in {THREADS} threads": Workload(threads, 250),
    "ResNet-50 inference, batch 16": Workload(inference, 20),
}
