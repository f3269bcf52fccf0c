"""Recorded and random sequences of allocations and releases.

A trace is a list of events ``(name, nbytes)``: a positive number allocates block ``name`` with that
many bytes, a negative one releases it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

Event = tuple[int, int]
Trace = list[Event]

MIB = 2**20

_ALLOCATION_PROBABILITY = 0.73
_MAX_USAGE = 16_000 * MIB


def random_trace(seed: int = 0, *, count: int = 10_000, largest: int = 64 * MIB) -> Trace:
    """The random workload of RMM's benchmark ``random_allocations``.

    Twice ``count`` times, allocate with a probability of 73% as long as the sum stays below
    16,000 MiB and at most ``count`` blocks were allocated; otherwise release a random block. Sizes
    are uniform.

    Args:
        seed: seed of the random choices.
        count: number of allocations.
        largest: bytes of the largest possible block; the smallest has 1.
    """
    choose = random.Random(seed)
    live: list[Event] = []
    usage = allocated = 0
    trace: Trace = []
    for _ in range(2 * count):
        nbytes = choose.randint(1, largest)
        wanted = not live or choose.random() < _ALLOCATION_PROBABILITY
        if wanted and allocated < count and usage + nbytes < _MAX_USAGE:
            live.append((allocated, nbytes))
            usage += nbytes
            trace.append((allocated, nbytes))
            allocated += 1
        elif live:
            index = choose.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            released, nbytes = live.pop()
            usage -= nbytes
            trace.append((released, -nbytes))
    return trace


def transformer_trace(
    seed: int = 0, *, steps: int = 20, width: int = 256, batches: int = 16, length: int = 192
) -> Trace:
    """A training of a transformer on batches whose size and length change with every step.

    Args:
        seed: seed of weights, batches and lengths.
        steps: number of AdamW steps.
        width: width of the model, which has four layers.
        batches: largest batch; the smallest is a quarter of it.
        length: longest sequence; the shortest is a sixth of it.
    """
    return _recorded(lambda: _train_transformer(seed, steps, width, batches, length))


def two_models_trace(
    seed: int = 0, *, steps: int = 20, batches: int = 16, image: int = 224
) -> Trace:
    """A training of a convolutional network on images of changing size, then of a transformer.

    Args:
        seed: seed of weights, batches, image sizes and lengths.
        steps: number of steps of each optimizer.
        batches: largest batch; the smallest is a quarter of it.
        image: largest side of an image; the smallest is two sevenths of it.
    """

    def train() -> None:
        _train_convolutions(seed, steps, batches, image)
        _train_transformer(seed, steps, 256, batches, 192)

    return _recorded(train)


def _train_transformer(seed: int, steps: int, width: int, batches: int, length: int) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        batch = choose.randint(batches // 4, batches)
        tokens = torch.randn(batch, choose.randint(length // 6, length), width)
        loss = model(tokens).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class _Residual(nn.Module):
    """Two convolutions with a shortcut, as in a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.main(images) + self.shortcut(images))


def _train_convolutions(seed: int, steps: int, batches: int, image: int) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    widths = [(64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(_Residual(*width) for width in widths),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 100),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(steps):
        batch = choose.randint(batches // 4, batches)
        side = choose.randint(image * 2 // 7, image)
        loss = model(torch.randn(batch, 3, side, side)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _recorded(train: Callable[[], None]) -> Trace:
    """Record what ``train`` allocates on the CPU, on one thread so that it is reproducible."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints when it starts and stops
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train()
    finally:
        torch.set_num_threads(threads)
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    found = [event for event in _all_events(roots) if event.tag == _EventType.Allocation]
    found.sort(key=lambda event: event.start_time_ns)
    return _named((event.extra_fields.ptr, event.extra_fields.alloc_size) for event in found)


def _all_events(roots: list[Any]) -> Iterator[Any]:
    waiting = list(roots)
    for event in waiting:  # grows meanwhile
        yield event
        waiting += event.children


def _named(changes: Iterator[tuple[int, int]]) -> Trace:
    """Number the blocks, because addresses are reused; omit blocks that existed before."""
    trace: Trace = []
    live: dict[int, Event] = {}
    for address, nbytes in changes:
        if address in live:
            name, size = live.pop(address)
            trace.append((name, -size))
        if nbytes > 0:
            live[address] = len(trace), nbytes
            trace.append(live[address])
    return trace
