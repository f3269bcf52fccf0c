"""Times whole training steps, plain and fused: ``python -m benchmarks.training_step [--save]``.

Forward, backward and step of small models with torch's optimizer, with torch's fused one, and with
the optimizer converted by ``transforms.optimize``; and under bfloat16 autocast, with plain and with
split weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from benchmarks import _command, _harness
from benchmarks._harness import Contender, Report
from fusedoptim import transforms

_TIME_LIMIT = 100  # seconds
LR = 1e-5  # small, because training continues throughout the benchmark


class Workload(NamedTuple):
    """A model, its batch of inputs and labels, and its optimizer."""

    name: str
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    optimizer: Callable[..., Optimizer]
    rounds: int


class Trainee:
    """A model in training that records the time of its optimizer."""

    def __init__(self, workload: Workload, *, autocast: bool = False, **options: Any) -> None:
        self.model = copy.deepcopy(workload.model)
        self.optimizer = workload.optimizer(self.model.parameters(), lr=LR, **options)
        self._batch = workload.batch
        self._precision = (
            torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
        )
        self.optimizer_seconds: list[float] = []

    def fused(self) -> Trainee:
        """Convert to the fused step."""
        self._optimize()
        return self

    def _optimize(self, **options: Any) -> None:
        transforms.optimize(
            self.model, self.optimizer, level="O0", inplace=True, fuse_update_step=True, **options
        )

    def split(self) -> Trainee:
        """Convert to the fused step and split weights."""
        self._optimize(dtype=torch.bfloat16, split_master_weight_for_bf16=True)
        return self

    def step(self) -> None:
        """Run a training iteration."""
        inputs, labels = self._batch
        self.optimizer.zero_grad()
        with self._precision:
            outputs = self.model(inputs)
        loss = cross_entropy(outputs.float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        start = time.perf_counter()
        self.optimizer.step()
        self.optimizer_seconds.append(time.perf_counter() - start)


def measure(make: Callable[[], Workload], rounds: int | None) -> Report:
    workload = make()
    return _timed(
        workload,
        rounds,
        {
            "plain": Trainee(workload),
            "torch's fused": Trainee(workload, fused=True),
            "fused": Trainee(workload).fused(),
        },
    )


def measure_in_bfloat16(make: Callable[[], Workload], rounds: int | None) -> Report:
    workload = make()
    workload = workload._replace(name=f"{workload.name} bf16")
    return _timed(
        workload,
        rounds,
        {
            "plain": Trainee(workload, autocast=True),
            "fused": Trainee(workload, autocast=True).fused(),
            "fused and split": Trainee(workload, autocast=True).split(),
        },
    )


def _timed(workload: Workload, rounds: int | None, trainees: dict[str, Trainee]) -> Report:
    contenders = [Contender(name, trainee.step) for name, trainee in trainees.items()]
    timings = _harness.time_interleaved(contenders, rounds or workload.rounds, limit=_TIME_LIMIT)
    notes = []
    for timing in timings:
        # Skip the untimed rounds.
        seconds = trainees[timing.name].optimizer_seconds[-len(timing.seconds) :]
        share = statistics.median(s / whole for s, whole in zip(seconds, timing.seconds))
        notes.append(f"{timing.name}: the optimizer takes {share:.1%} of an iteration")
    return Report(workload.name, timings, notes=notes)


class SmallCNN(nn.Sequential):
    """Four convolutions on images of 8 by 8 pixels: 67,978 weights, as in examples/digits.py."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for i, (width_in, width_out) in enumerate(((1, 32), (32, 32), (32, 64), (64, 64))):
            layers += [
                nn.Conv2d(width_in, width_out, kernel_size=3, padding=1, bias=False),
                nn.BatchNorm2d(width_out),
                nn.ReLU(),
            ]
            if i % 2:
                layers.append(nn.MaxPool2d(2))
        super().__init__(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


class BertTiny(nn.Module):
    """BERT with two of torch's layers of width 128, and a head of two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30_522, 128)
        self.positions = nn.Embedding(512, 128)
        self.norm = nn.LayerNorm(128)
        layer = nn.TransformerEncoderLayer(128, 2, 512, 0.0, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.pooler = nn.Linear(128, 128)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of a batch of sequences."""
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.layers(self.norm(x))
        logits: Tensor = self.head(torch.tanh(self.pooler(x[:, 0])))
        return logits


def _cnn(name: str, optimizer: Callable[..., Optimizer]) -> Workload:
    batch = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    return Workload(name, SmallCNN(), batch, optimizer, rounds=400)


def _bert(name: str, optimizer: Callable[..., Optimizer]) -> Workload:
    batch = torch.randint(30_522, (8, 64)), torch.randint(2, (8,))
    return Workload(name, BertTiny(), batch, optimizer, rounds=200)


_MODELS = {"cnn": _cnn, "bert-tiny": _bert}
_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "AdamW": torch.optim.AdamW,
}


def workloads() -> dict[str, Callable[[int | None], Report]]:
    """Return a workload for each model, optimizer and dtype, by name."""
    result: dict[str, Callable[[int | None], Report]] = {}
    for model, make in _MODELS.items():
        for optimizer, cls in _OPTIMIZERS.items():
            name = f"{model} {optimizer}"
            workload = functools.partial(make, name, cls)
            result[name] = functools.partial(measure, workload)
            result[f"{name} bf16"] = functools.partial(measure_in_bfloat16, workload)
    return result


if __name__ == "__main__":
    _command.run("training_step", __doc__, workloads())
