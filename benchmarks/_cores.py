"""Times steps and kernels that only move their bytes, in a process started for cores.py."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks._harness import Contender, time_interleaved
from benchmarks._shapes import MODELS
from benchmarks._workloads import LR, MOMENTUM
from benchmarks.traffic import Traffic
from fusedoptim import FusedAdamW, FusedSGD
from fusedoptim.raw import ElementwiseKernel

TRAFFIC, ADAM_TRAFFIC, OPERATIONS = "pure traffic", "Adam's traffic", "torch's operations"
"""Steps are compared with these: kernels that move the bytes of SGD with momentum and of Adam, and
torch operations that move those of SGD."""
_ROUNDS, _LIMIT = 60, 6.0


def times(workload: str) -> dict[str, list[float]]:
    """Seconds of each contender's steps, interleaved."""
    params = [torch.randn(shape).requires_grad_() for shape in MODELS[workload]()]
    for p in params:
        p.grad = torch.randn_like(p)
    traffic = Traffic(params)
    traffic.read_gradients()
    steps: dict[str, Callable[[], object]] = {
        TRAFFIC: traffic.step,
        ADAM_TRAFFIC: _adam_traffic(params),
        OPERATIONS: _operations(params),
        "FusedSGD": FusedSGD(params, lr=LR, momentum=MOMENTUM).step,
        "FusedAdamW": FusedAdamW(params, lr=LR).step,
    }
    contenders = [Contender(name, step) for name, step in steps.items()]
    timings = time_interleaved(contenders, _ROUNDS, limit=_LIMIT)
    return {timing.name: list(timing.seconds) for timing in timings}


def _adam_traffic(params: list[torch.Tensor]) -> Callable[[], None]:
    """A launch for each parameter that reads four arrays and writes three, 28 bytes an element."""
    kernel = ElementwiseKernel(
        "T p, T g, T m, T v", "T to_p, T to_m, T to_v", "to_m = g; to_v = m; to_p = p - v", "adam"
    )
    rows = []
    for p in params:
        state = [torch.zeros_like(p, requires_grad=False) for _ in range(2)]
        rows.append((p.detach(), p.grad, *state, p.detach(), *state))

    def run() -> None:
        for row in rows:
            kernel(*row)

    return run


def _operations(params: list[torch.Tensor]) -> Callable[[], None]:
    """Two torch operations on each parameter, together 20 bytes an element."""
    buffers = [torch.zeros_like(p, requires_grad=False) for p in params]
    triples = [(p.detach(), p.grad, b) for p, b in zip(params, buffers) if p.grad is not None]

    def run() -> None:
        for p, grad, buffer in triples:
            buffer.copy_(grad)
            p.sub_(buffer)

    return run
