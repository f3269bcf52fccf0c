"""Times FusedSGD against torch's SGD: ``python -m benchmarks.sgd [--save]``.

SGD with momentum in float32. The optimizers of a workload share parameters and gradients, and
each has momentum buffers of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import _harness
from benchmarks._harness import Absent, Contender, Report, Timing
from benchmarks._shapes import MODELS
from benchmarks.traffic import Traffic
from fusedoptim import FusedSGD

LR = 1e-9  # no step of any optimizer may lead to infinity
MOMENTUM = 0.9
BYTES_PER_PARAMETER = 20  # reads parameter, gradient and momentum, writes the first and the last
TRAFFIC = "pure traffic"

_MOST_COMPILED = 500  # tensors: 42 s on two cores; 1,000 take 124 s
_COMPILE_LIMIT = 100  # seconds
# Seconds for each workload. A step of torch's takes 10 ms for ResNet-50, but a second while another
# job has one of the cores: its threads spin at a barrier for each tensor.
_TIME_LIMIT = 30
_STARTUPS = 5
_ROOT = Path(__file__).resolve().parent.parent


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


WORKLOADS = (
    Workload("16.8M", 200),
    Workload("resnet50", 150),
    Workload("bert-base", 60),
    Workload("10000x1000", 30, new_gradients=True),
    Workload("8192", 1500, lead=4),
)
STARTUP, MEMORY = "startup", "memory"


def time_workload(workload: Workload, rounds: int | None) -> Report:
    """Time every contender on one list of shapes, for so many rounds or as the workload needs."""
    shapes = MODELS[workload.name]()
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    seeds = [torch.randn(shape) * 1e-3 for shape in shapes]
    _make_gradients(params, seeds)
    traffic = Traffic(params)
    traffic.read_gradients()
    small_network = _forward_and_backward()

    def before_step() -> None:
        if workload.new_gradients:
            _make_gradients(params, seeds)
            traffic.read_gradients()
        else:
            small_network()

    compiled = _compiled(params)
    # torch's fused SGD leaves its threads spinning, as a backward pass would, and FusedSGD ends
    # them, so pure traffic has all cores. The next of torch's pays less than 0.1 ms for new
    # threads, of more than 10 ms.
    contenders = [
        _torch_sgd("torch fused", params, fused=True),
        Contender("FusedSGD", FusedSGD(params, lr=LR, momentum=MOMENTUM).step),
        Contender(TRAFFIC, traffic.step),
        _torch_sgd("torch foreach", params, foreach=True),
        _torch_sgd("torch single-tensor", params, foreach=False, fused=False),
    ]
    if isinstance(compiled, Contender):
        contenders.append(compiled)
    timings = _harness.time_interleaved(
        contenders,
        rounds or workload.rounds,
        before_step,
        lead=workload.lead,
        limit=_TIME_LIMIT if rounds is None else math.inf,
    )
    absent = [compiled] if isinstance(compiled, Absent) else []
    return Report(workload.name, BYTES_PER_PARAMETER * sum(map(math.prod, shapes)), timings, absent)


def _make_gradients(params: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    for param in params:
        param.grad = None
    torch.autograd.backward(params, seeds)


def _forward_and_backward() -> Callable[[], None]:
    """What comes before a step in training, on a network of 7,989 parameters.

    Without it, the step of 8,192 parameters takes half the time: every cache is warm.
    """
    network = torch.nn.Sequential(torch.nn.Linear(90, 79), torch.nn.ReLU(), torch.nn.Linear(79, 10))
    batch = torch.randn(32, 90)

    def run() -> None:
        network(batch).sum().backward()

    return run


def _torch_sgd(name: str, params: list[Tensor], **options: bool) -> Contender:
    optimizer = torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, **options)
    return Contender(name, optimizer.step)


def _compiled(params: list[Tensor]) -> Contender | Absent:
    """SGD's step through torch.compile, as torch's recipe has it, or why that cannot be had."""
    name = "torch compiled"
    if len(params) > _MOST_COMPILED:
        return Absent(name, f"{len(params):,} tensors take too long to compile")
    optimizer = torch.optim.SGD(params, lr=LR, momentum=MOMENTUM, foreach=True)
    optimizer.step()  # the first step, which makes the buffers, would be compiled for itself
    torch.compiler.reset()
    step: Callable[[], None] = torch.compile(lambda: optimizer.step())
    try:
        with _time_limit(_COMPILE_LIMIT):
            step()
    except Exception as error:  # of many classes, as when there is no C++ compiler
        return Absent(name, f"{type(error).__name__}: {error}".strip().splitlines()[0])
    return Contender(name, step)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once the time is over."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def time_startup(rounds: int) -> Report:
    """Time import and first step, in new processes by turns."""
    classes = {"torch.optim.SGD": "torch.optim:SGD", "FusedSGD": "fusedoptim:FusedSGD"}
    seconds: dict[str, list[float]] = {name: [] for name in classes}
    for _ in range(rounds):
        for name, where in classes.items():
            seconds[name].append(float(_output("benchmarks._startup", where)))
    return Report(STARTUP, None, [Timing(name, times) for name, times in seconds.items()])


def print_startup(report: Report) -> None:
    """Print the table, and what FusedSGD takes beyond torch's SGD."""
    _harness.print_report(report)
    torch_sgd, fused_sgd = report.timings
    for fact in ("minimum", "median"):
        extra = getattr(fused_sgd, fact) - getattr(torch_sgd, fact)
        print(f"FusedSGD takes {extra:+.2f} s, by the {fact}")


def print_memory() -> None:
    """Print by how much the resident memory peaks in FusedSGD's second step."""
    rows = []
    for model in ("resnet50", "bert-base"):
        size = 4 * sum(map(math.prod, MODELS[model]()))
        peak = int(_output("benchmarks._memory", "fusedoptim:FusedSGD", model))
        rows.append([model, f"{size / 1e6:.1f} MB", f"{peak / 1e6:.2f} MB", f"{peak / size:.2%}"])
    print("\nextra memory of FusedSGD's step")
    _harness.print_table(["model", "parameters", "peak", "of parameters"], rows)


def _output(module: str, *args: str) -> str:
    """What a module prints when run in a process of its own."""
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(
        command, cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def main() -> None:
    """Run the workloads that the command line names, or all."""
    names = [*(workload.name for workload in WORKLOADS), STARTUP, MEMORY]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sgd", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, help="of each workload; default: as it needs")
    parser.add_argument("--workload", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results/sgd.csv")
    args = parser.parse_args()
    chosen = args.workload or names

    _harness.print_machine()
    reports = []
    for workload in WORKLOADS:
        if workload.name in chosen:
            reports.append(time_workload(workload, args.rounds))
            _harness.print_report(reports[-1], TRAFFIC)
    if STARTUP in chosen:
        reports.append(time_startup(args.rounds or _STARTUPS))
        print_startup(reports[-1])
    if MEMORY in chosen:
        print_memory()
    if args.save:
        _harness.save("sgd", reports)


if __name__ == "__main__":
    main()
