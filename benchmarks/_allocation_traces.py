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

_STEPS = 20  # of each optimizer
_BATCHES, _LENGTHS, _IMAGES = (4, 16), (32, 192), (64, 224)  # the smallest and the largest


def random_trace(seed: int) -> Trace:
    """The random workload of RMM's benchmark ``random_allocations``, with sizes up to 64 MiB.

    There are 20,000 steps. Each allocates with a probability of 73%, as long as the sum stays below
    16,000 MiB and at most 10,000 blocks were allocated; otherwise it releases a random block. Sizes
    are uniform.
    """
    count, largest, most_used, probability = 10_000, 64 * MIB, 16_000 * MIB, 0.73
    choose = random.Random(seed)
    live: list[Event] = []
    usage = allocated = 0
    trace: Trace = []
    for _ in range(2 * count):
        nbytes = choose.randint(1, largest)
        wanted = not live or choose.random() < probability
        if wanted and allocated < count and usage + nbytes < most_used:
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


def transformer_trace(seed: int) -> Trace:
    """A training run of a transformer on batches whose size and length change with every step."""
    return _recorded(lambda: _train_transformer(seed))


def two_models_trace(seed: int) -> Trace:
    """Training runs of a convolutional network, on images of changing size, and a transformer."""

    def train() -> None:
        _train_convolutions(seed)
        _train_transformer(seed)

    return _recorded(train)


def _train_transformer(seed: int) -> None:
    torch.manual_seed(seed)
    choose = random.Random(seed)
    width = 256
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(_STEPS):
        tokens = torch.randn(choose.randint(*_BATCHES), choose.randint(*_LENGTHS), width)
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


def _train_convolutions(seed: int) -> None:
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
    for _ in range(_STEPS):
        batch, side = choose.randint(*_BATCHES), choose.randint(*_IMAGES)
        loss = model(torch.randn(batch, 3, side, side)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _recorded(train: Callable[[], None]) -> Trace:
    """Record the CPU allocations of ``train``, on one thread so that they are reproducible."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints when it starts and stops
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
