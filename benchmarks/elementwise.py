"""Times ElementwiseKernel and ReductionKernel: ``python -m benchmarks.elementwise [--save]``.

Each workload is an operation in torch, the base, and in fusedoptim, on 16.8 M float32 elements
unless its name says otherwise. Outputs are reused. ``small`` has 1,024 elements and runs 100 times.
``sums-...`` are sums and norms of 1,000 to 16 Mi elements into an output that is passed, each up to
100 times; times are totals. A sum of 16 elements, repeated as often, shows the cost of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import _command
from benchmarks._harness import Contender, Report, repeated, time_interleaved
from fusedoptim.raw import ElementwiseKernel, ReductionKernel

_N = 4096
_REPEATS = 100
_ROUNDS = 40
_SUMMED = 2 << 20
_SIZES = {
    "1000": 1000,
    **{f"{n}Ki": n << 10 for n in (64, 256)},
    **{f"{n}Mi": n << 20 for n in (1, 4, 16)},
}

square = ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "squared_difference")
gelu = ElementwiseKernel(
    "T x", "T y", "y = 0.5f * x * (1 + tanh(0.79788456f * (x + 0.044715f * x * x * x)))", "gelu"
)
total = ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
norm = ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")

Call = Callable[[], Any]


def _squares(dtype: torch.dtype) -> tuple[Call, Call, int]:
    x, y, z = (torch.randn(_N, _N).to(dtype) for _ in range(3))
    moved = 3 * x.nbytes
    return lambda: torch.sub(x, y, out=z).square_(), lambda: square(x, y, z), moved


def _row() -> tuple[Call, Call, int]:
    x, row, z = torch.randn(_N, _N), torch.randn(_N), torch.empty(_N, _N)
    return lambda: torch.sub(x, row, out=z).square_(), lambda: square(x, row, z), 2 * x.nbytes


def _gelu() -> tuple[Call, Call, int]:
    x, y = torch.randn(_N, _N), torch.empty(_N, _N)
    theirs = functools.partial(torch.ops.aten.gelu.out, x, approximate="tanh", out=y)
    return theirs, lambda: gelu(x, y), 2 * x.nbytes


def _sum(axis: int | None) -> tuple[Call, Call, int]:
    x = torch.randn(_N, _N)
    return lambda: torch.sum(x, dim=axis), lambda: total(x, axis=axis), x.nbytes


def _norm() -> tuple[Call, Call, int]:
    x = torch.randn(_N, _N)
    return lambda: torch.linalg.vector_norm(x), lambda: norm(x), x.nbytes


def _small() -> tuple[Call, Call, None]:
    x, y, z = (torch.randn(1024) for _ in range(3))
    theirs = repeated(lambda: torch.sub(x, y, out=z).square_(), _REPEATS)
    return theirs, repeated(lambda: square(x, y, z), _REPEATS), None


_WORKLOADS: dict[str, Callable[[], tuple[Call, Call, int | None]]] = {
    "square": lambda: _squares(torch.float32),
    "square-bfloat16": lambda: _squares(torch.bfloat16),
    "square-row": _row,
    "gelu": _gelu,
    "sum": lambda: _sum(None),
    "sum-axis0": lambda: _sum(0),
    "sum-axis1": lambda: _sum(1),
    "norm": _norm,
    "small": _small,
}


def _sums(size: str, rounds: int | None) -> Report:
    x, y, few = torch.randn(_SIZES[size]), torch.empty(()), torch.randn(16)
    times = min(max(_SUMMED // len(x), 1), _REPEATS)
    calls: dict[str, Call] = {
        "torch.sum": lambda: torch.sum(x, dim=0, out=y),
        "sum": lambda: total(x, y),
        "sum of 16": lambda: total(few, y),
        "vector_norm": lambda: torch.linalg.vector_norm(x, out=y),
        "norm": lambda: norm(x, y),
    }
    contenders = [Contender(name, repeated(call, times)) for name, call in calls.items()]
    note = f"{times} calls"
    return Report(f"sums-{size}", time_interleaved(contenders, rounds or 100), notes=[note])


def _measure(name: str, rounds: int | None) -> Report:
    theirs, ours, moved = _WORKLOADS[name]()
    contenders = [Contender("torch", theirs, moved), Contender("here", ours, moved)]
    return Report(name, time_interleaved(contenders, rounds or _ROUNDS))


if __name__ == "__main__":
    measures = {name: functools.partial(_measure, name) for name in _WORKLOADS}
    measures |= {f"sums-{size}": functools.partial(_sums, size) for size in _SIZES}
    _command.run("elementwise", __doc__, measures)
