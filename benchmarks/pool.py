"""Times the pool against torch's allocator and raw USM: ``python -m benchmarks.pool [--save]``.

``hit`` allocates and releases a tensor of 1,024 float32 elements 1,000 times; times are totals.
``64 MiB`` fills and releases one tensor. ``SGD`` and ``Adam`` time our step on one parameter of
8.4 M elements: with state from torch, where all arrays have the same address modulo 4 KiB, and with
state from the pool, which staggers addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from allocator import Pool, load_dpctl, queue
from benchmarks import _command
from benchmarks._harness import Contender, Report, repeated, time_interleaved
from fusedoptim import FusedAdam, FusedSGD

_REPEATS = 1000
_LARGE = 16 << 20  # elements of float32
_ELEMENTS = 8_400_000


def hit(rounds: int | None) -> Report:
    pool = Pool("cpu")
    contenders = [
        Contender("torch.empty", repeated(lambda: torch.empty(1024), _REPEATS)),
        Contender("pool.empty", repeated(lambda: pool.empty(1024), _REPEATS)),
        Contender("pool.empty, dtype", repeated(lambda: pool.empty(1024, torch.float32), _REPEATS)),
        Contender(
            "torch.empty, dtype", repeated(lambda: torch.empty(1024, dtype=torch.float32), _REPEATS)
        ),
        Contender("pool.empty, two at a time", repeated(_pairs(pool.empty), _REPEATS // 2)),
        Contender("torch.empty, two at a time", repeated(_pairs(torch.empty), _REPEATS // 2)),
        Contender("pool.empty, kept until the next", _kept(pool.empty)),
        Contender("torch.empty, kept until the next", _kept(torch.empty)),
    ]
    return Report("hit", time_interleaved(contenders, rounds or 200))


def large(rounds: int | None) -> Report:
    pool = Pool("cpu")
    memory, cpu = load_dpctl().memory, queue("cpu")

    def raw_usm() -> None:
        buffer = memory.MemoryUSMShared(4 * _LARGE, queue=cpu)
        torch.frombuffer(buffer, dtype=torch.float32).fill_(1)

    contenders = [
        Contender("torch.empty, fill_", lambda: torch.empty(_LARGE).fill_(1)),
        Contender("pool.empty, fill_", lambda: pool.empty(_LARGE).fill_(1)),
        Contender("raw USM, fill_", raw_usm),
    ]
    return Report("64 MiB", time_interleaved(contenders, rounds or 50))


def step(
    name: str, optimizer: Callable[[list[Parameter]], Optimizer], rounds: int | None
) -> Report:
    contenders = []
    for state_of in ("torch", "the pool"):
        parameter = Parameter(torch.randn(_ELEMENTS))
        parameter.grad = torch.randn(_ELEMENTS)
        stepped = optimizer([parameter])
        stepped.step()
        if state_of == "torch":
            state = stepped.state[parameter]
            for key, value in state.items():
                if value.shape == parameter.shape:
                    state[key] = torch.empty_like(value).copy_(value)
        contenders.append(Contender(f"state of {state_of}", stepped.step))
    return Report(name, time_interleaved(contenders, rounds or 100))


def sgd(rounds: int | None) -> Report:
    return step("SGD", lambda params: FusedSGD(params, lr=1e-3, momentum=0.9), rounds)


def adam(rounds: int | None) -> Report:
    return step("Adam", lambda params: FusedAdam(params, lr=1e-3), rounds)


def _pairs(empty: Callable[[int], Any]) -> Callable[[], object]:
    return lambda: (empty(1024), empty(1024))


def _kept(empty: Callable[[int], Any]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_REPEATS):
            kept = empty(1024)
        del kept

    return run


if __name__ == "__main__":
    _command.run("pool", __doc__, {"hit": hit, "64 MiB": large, "SGD": sgd, "Adam": adam})
