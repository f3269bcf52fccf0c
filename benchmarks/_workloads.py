"""Lists of parameters, and the contenders that every table of them has."""

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

LR = 1e-9  # no step of any optimizer may lead to infinity
MOMENTUM = 0.9
SGD_BYTES = 20
"""Bytes for each parameter: reads it, gradient and momentum, writes the first and the last."""
BASE = "torch fused SGD"
TRAFFIC = "pure traffic"

# Seconds for each workload. A step of torch's takes 10 ms for ResNet-50, but a second while another
# job has one of the cores: its threads spin at a barrier for each tensor.
_TIME_LIMIT = 100


class Workload(NamedTuple):
    """What is timed on one list of shapes."""

    name: str
    """of the list, in MODELS."""
    rounds: int
    """at most, when the command line does not say: enough for a steady minimum."""
    new_gradients: bool = False
    """whether gradients are made anew before each step, as after zero_grad()."""
    lead: int = 0
    """untimed steps before each timed one: a short step depends on whose code the caches hold."""


RESNET50 = Workload("resnet50", 150)
BERT_BASE = Workload("bert-base", 60)
DLRM = Workload("dlrm", 100)
MANY_SMALL = Workload("10000x1000", 30, new_gradients=True)
WORKLOADS = (RESNET50, BERT_BASE, DLRM, MANY_SMALL)
"""What every optimizer is timed on."""


class _Parameters:
    """One list of parameters with gradients."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype) -> None:
        self.tensors = [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]
        self._seeds = [torch.randn_like(p, requires_grad=False) * 1e-3 for p in self.tensors]
        self.make_gradients()

    def make_gradients(self) -> None:
        """Make new gradients, the old ones freed."""
        for param in self.tensors:
            param.grad = None
        torch.autograd.backward(self.tensors, self._seeds)


class Bench:
    """The parameters of one workload with gradients, which its contenders share.

    Each contender has state of its own.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._shapes = MODELS[workload.name]()
        self._lists: dict[torch.dtype, _Parameters] = {}
        self._traffic = Traffic(self.params())
        self._traffic.read_gradients()
        self._small_network = _forward_and_backward()

    def params(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The parameters in ``dtype``: one list, made when it is first asked for."""
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
        """One that updates all of the workload's parameters."""
        return Contender(name, step, bytes_per_parameter * sum(map(math.prod, self._shapes)), peer)

    def torch_fused_sgd(self) -> Contender:
        """With momentum, in float32: the base of every table of parameter lists."""
        optimizer = torch.optim.SGD(self.params(), lr=LR, momentum=MOMENTUM, fused=True)
        return self.contender(BASE, optimizer.step, SGD_BYTES)

    def pure_traffic(self) -> Contender:
        """Best right after one of ours.

        Ours leave the driver's threads awake. Those of torch, which spin after its fused steps as
        they would after a backward pass, are put to sleep for pure traffic as for ours.
        """
        return self.contender(TRAFFIC, self._traffic.step, SGD_BYTES)

    def time(self, contenders: Iterable[Contender | Absent], rounds: int | None) -> Report:
        """Time all that are not absent, for so many rounds or as the workload needs."""
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


def _forward_and_backward() -> Callable[[], None]:
    """What comes before a step in training, on a network of 7,989 parameters.

    Without it, the step of 8,192 parameters takes half the time: every cache is warm.
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
    """For each workload, by its name, what times its contenders."""

    def measure(workload: Workload, rounds: int | None) -> Report:
        bench = Bench(workload)
        return bench.time(contenders(bench), rounds)

    return {workload.name: functools.partial(measure, workload) for workload in workloads}
