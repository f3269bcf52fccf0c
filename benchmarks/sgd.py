"""Times FusedSGD against torch's SGD: ``python -m benchmarks.sgd [--save]``.

Steps are SGD with momentum in float32.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import torch
from torch import Tensor

from benchmarks import _command
from benchmarks._fresh import measured
from benchmarks._harness import Absent, Contender, Report, Timing
from benchmarks._output import Table
from benchmarks._shapes import MODELS
from benchmarks._workloads import LARGE, LR, MOMENTUM, SGD_BYTES, SMALL, WORKLOADS, Bench, timed
from fusedoptim import FusedSGD

STARTUP, MEMORY = "startup", "memory"

_MOST_COMPILED = 500  # tensors; beyond this, compile time grows faster than their number
_COMPILE_LIMIT = 100  # seconds
_STARTUPS = 5


def contenders(bench: Bench) -> Iterator[Contender | Absent]:
    params = bench.params()
    compiled = _compiled(bench)
    yield bench.torch_fused_sgd()
    ours = FusedSGD(params, lr=LR, momentum=MOMENTUM)
    yield bench.contender("FusedSGD", ours.step, SGD_BYTES)
    yield bench.pure_traffic()
    foreach = _torch_sgd(params, foreach=True)
    yield bench.contender("torch foreach SGD", foreach.step, SGD_BYTES)
    single = _torch_sgd(params, foreach=False, fused=False)
    yield bench.contender("torch single-tensor SGD", single.step, SGD_BYTES)
    yield compiled


def _torch_sgd(params: list[Tensor], **options: bool) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, **options)


def _compiled(bench: Bench) -> Contender | Absent:
    """Return SGD's step through torch.compile, as in torch's recipe, or why it is absent."""
    name = "torch compiled SGD"
    params = bench.params()
    if len(params) > _MOST_COMPILED:
        return Absent(name, f"{len(params):,} tensors take too long to compile")
    optimizer = _torch_sgd(params, foreach=True)
    optimizer.step()  # creates the buffers; otherwise this first step would be compiled separately
    torch.compiler.reset()
    step: Callable[[], None] = torch.compile(lambda: optimizer.step())
    try:
        with _time_limit(_COMPILE_LIMIT):
            step()
    except Exception as error:  # of many classes, for example without a C++ compiler
        return Absent(name, f"{type(error).__name__}: {error}".strip().splitlines()[0])
    return bench.contender(name, step, SGD_BYTES)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the time is over."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not finished after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def startup(rounds: int | None) -> Report:
    """Time import and first step in fresh processes, alternately."""
    classes = {"torch.optim.SGD": "torch.optim:SGD", "FusedSGD": "fusedoptim:FusedSGD"}
    seconds: dict[str, list[float]] = {name: [] for name in classes}
    for _ in range(rounds or _STARTUPS):
        for name, where in classes.items():
            seconds[name].append(measured("startup", where))
    theirs, ours = itertools.starmap(Timing, seconds.items())
    notes = [
        f"FusedSGD takes {ours.minimum - theirs.minimum:+.2f} s, by the minimum",
        f"FusedSGD takes {ours.median - theirs.median:+.2f} s, by the median",
    ]
    return Report(STARTUP, [theirs, ours], notes=notes)


def memory(rounds: int | None) -> Table:
    """Measure the rise of memory in FusedSGD's second step; further rounds would be identical."""
    del rounds
    rows = []
    for model in ("resnet50", "bert-base"):
        size = 4 * sum(map(math.prod, MODELS[model]()))
        peak = measured("step_memory", "fusedoptim:FusedSGD", model)
        rows.append([model, f"{size / 1e6:.1f} MB", f"{peak / 1e6:.2f} MB", f"{peak / size:.2%}"])
    header = ["model", "parameters", "peak", "of parameters"]
    return Table("extra memory of FusedSGD's step", header, rows)


if __name__ == "__main__":
    workloads = timed([LARGE, *WORKLOADS, SMALL], contenders)
    _command.run("sgd", __doc__, {**workloads, STARTUP: startup, MEMORY: memory})
