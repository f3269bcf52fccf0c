"""Parameter lists, and the contenders that every table has."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import _harness
from benchmarks._harness import Absent, Contender, Report
from benchmarks._shapes import MODELS, Shape
from benchmarks.traffic import Traffic

LR = 1e-9  # so small that no optimizer reaches infinity
MOMENTUM = 0.9
SGD_BYTES = 20
"""Bytes per parameter: reads parameter, gradient and momentum, writes parameter and momentum."""
BASE = "torch fused SGD"
TRAFFIC = "pure traffic"

# Seconds for each workload. While another job uses a core, torch's steps become much slower,
# because torch's threads spin at a barrier for each tensor (docs/benchmarks/README.md).
_TIME_LIMIT = 100


class Workload(NamedTuple):
    """A list of shapes, and how it is timed."""

    name: str
    """Key of the list in MODELS."""
    rounds: int
    """Default number of rounds, enough for a stable minimum."""
    new_gradients: bool = False
    """Whether gradients are new tensors in each step, as after zero_grad()."""
    lead: int = 0
    """Untimed steps before each timed one: a short step depends on the code in the caches."""


RESNET50 = Workload("resnet50", 150)
BERT_BASE = Workload("bert-base", 60)
DLRM = Workload("dlrm", 100)
MANY_SMALL = Workload("10000x1000", 30, new_gradients=True)
LARGE = Workload("16.8M", 200)
SMALL = Workload("8192", 1500, lead=4)
WORKLOADS = (RESNET50, BERT_BASE, DLRM, MANY_SMALL)
"""The workloads of every optimizer."""


class _Parameters:
    """A list of parameters with gradients."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        self.tensors = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
        self._seeds = [torch.randn_like(p, requires_grad=False) * 1e-3 for p in self.tensors]
        self.make_gradients()

    def make_gradients(self) -> None:
        """Free the gradients and create new ones."""
        for param in self.tensors:
            param.grad = None
        torch.autograd.backward(self.tensors, self._seeds)


class Bench:
    """The parameters and gradients of a workload, which its contenders share.

    Each contender has its own state.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._shapes = MODELS[workload.name]()
        self._lists: dict[torch.dtype, _Parameters] = {}
        self._traffic = Traffic(self.params())
        self._traffic.read_gradients()
        self._small_network = small_network()

    def params(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the parameters in ``dtype``, created on first use."""
        if dtype not in self._lists:
            self._lists[dtype] = _Parameters(self._shapes, dtype)
        return self._lists[dtype].tensors

    def contender(
        self,
        name: str,
        step: Callable[[], object],
        bytes_per_parameter: int,
        peer: str | None = None,
    ) -> Contender:
        """Return a contender that updates all parameters of the workload."""
        return Contender(name, step, bytes_per_parameter * sum(map(math.prod, self._shapes)), peer)

    def torch_fused_sgd(self) -> Contender:
        """Return torch's fused SGD with momentum in float32, the base of every table."""
        optimizer = torch.optim.SGD(self.params(), lr=LR, momentum=MOMENTUM, fused=True)
        return self.contender(BASE, optimizer.step, SGD_BYTES)

    def pure_traffic(self) -> Contender:
        """Return the kernel that only moves SGD's bytes."""
        return self.contender(TRAFFIC, self._traffic.step, SGD_BYTES)

    def time(self, contenders: Iterable[Contender | Absent], rounds: int | None) -> Report:
        """Time all contenders that are not absent, for ``rounds`` or the workload's default."""
        contenders = list(contenders)
        timings = _harness.time_interleaved(
            [contender for contender in contenders if isinstance(contender, Contender)],
            rounds or self._workload.rounds,
            self._before_step,
            lead=self._workload.lead,
            limit=_TIME_LIMIT if rounds is None else math.inf,
        )
        absent = [contender for contender in contenders if isinstance(contender, Absent)]
        notes = [f"{name}: not available: {reason}" for name, reason in absent]
        return Report(self._workload.name, timings, TRAFFIC, notes)

    def _before_step(self) -> None:
        if self._workload.new_gradients:
            for parameters in self._lists.values():
                parameters.make_gradients()
            self._traffic.read_gradients()
        else:
            self._small_network()


def small_network() -> Callable[[], None]:
    """Return a forward and a backward pass of a network of 7,989 parameters.

    It runs before each step, as in training; otherwise the step would find every cache warm.
    """
    network = torch.nn.Sequential(torch.nn.Linear(90, 79), torch.nn.ReLU(), torch.nn.Linear(79, 10))
    batch = torch.randn(32, 90)

    def run() -> None:
        network(batch).sum().backward()

    return run


def timed(
    workloads: Iterable[Workload],
    contenders: Callable[[Bench], Iterable[Contender | Absent]],
) -> dict[str, Callable[[int | None], Report]]:
    """Return, for each workload by name, a function that times its contenders."""

    def measure(workload: Workload, rounds: int | None) -> Report:
        bench = Bench(workload)
        return bench.time(contenders(bench), rounds)

    return {workload.name: functools.partial(measure, workload) for workload in workloads}
