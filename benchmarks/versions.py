"""Times the steps of another version beside today's: ``python -m benchmarks.versions FOLDER``.

FOLDER is a checkout of the other version, as ``git worktree add --detach FOLDER COMMIT`` makes it.
Both run in one process, in turn, over the same parameters, gradients and state: from one process to
the next, a step of large tensors may take 1.6 times as long, as their pages lie elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import _harness, _output
from benchmarks._harness import Contender, Report
from benchmarks._shapes import MODELS
from benchmarks._workloads import LR, MOMENTUM, WORKLOADS, Workload, small_network

_PACKAGES = ("fusedoptim", "allocator", "transforms")
_OPTIMIZERS = ("FusedSGD", "SplitSGD", "FusedAdagrad", "FusedAdam", "FusedAdamW", "FusedLamb")
_WORKLOADS = {
    workload.name: workload
    for workload in (Workload("8192", 300, lead=2), *WORKLOADS, Workload("16.8M", 40))
}


class _Version:
    """The packages of one version."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._modules: dict[str, ModuleType] = {}

    def select(self) -> None:
        """Let imports, those within functions too, find these packages."""
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(self._modules)
        sys.path[0] = self._folder

    def optimizer(self, name: str, params: list[Tensor]) -> torch.optim.Optimizer:
        """An optimizer that has made its first step."""
        self.select()
        options = {"momentum": MOMENTUM} if name.endswith("SGD") else {}
        package = importlib.import_module("fusedoptim")
        optimizer: torch.optim.Optimizer = getattr(package, name)(params, lr=LR, **options)
        optimizer.step()
        self._modules = _loaded()
        return optimizer


def _loaded() -> dict[str, ModuleType]:
    modules = sys.modules.items()
    return {name: module for name, module in modules if name.partition(".")[0] in _PACKAGES}


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, with a count of writes of its own."""
    return tensor.data.requires_grad_(tensor.requires_grad)


def _share(params: list[Tensor], other: torch.optim.Optimizer, optimizer: Any) -> None:
    """Give an optimizer of ``params`` the memory of another's state."""
    for param, state in zip(params, other.state.values()):
        optimizer.state[param] = {
            key: value.clone() if key == "step" else _alias(value) for key, value in state.items()
        }


def measure(folder: Path, name: str, workload: Workload, rounds: int | None) -> Report:
    """Time the steps of one optimizer on one list."""
    dtype = torch.bfloat16 if name == "SplitSGD" else torch.float32
    theirs = [torch.randn(s, dtype=dtype).requires_grad_() for s in MODELS[workload.name]()]
    ours = list(map(_alias, theirs))

    def make_gradients() -> None:
        for mine, other in zip(ours, theirs):
            mine.grad = other.grad = torch.randn_like(other, requires_grad=False) * 1e-3

    make_gradients()
    before, today = versions = _Version(str(folder)), _Version(sys.path[0])
    optimizers = before.optimizer(name, theirs), today.optimizer(name, ours)
    _share(ours, *optimizers)
    runs_next = itertools.cycle([v for v in versions for _ in range(workload.lead + 1)])
    network = small_network()

    def before_step() -> None:
        next(runs_next).select()
        if workload.new_gradients:
            make_gradients()
        network()

    contenders = [
        Contender(str(folder), optimizers[0].step),
        Contender("today", optimizers[1].step),
    ]
    rounds = rounds or workload.rounds
    timings = _harness.time_interleaved(contenders, rounds, before_step, lead=workload.lead)
    return Report(f"{name}, {workload.name}", timings)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--optimizer", action="append", choices=_OPTIMIZERS)
    parser.add_argument("--workload", action="append", choices=_WORKLOADS)
    args = parser.parse_args()
    if not (args.folder / "fusedoptim").is_dir():
        parser.error(f"FOLDER={str(args.folder)!r} has no package fusedoptim")
    _output.print_machine()
    for workload in args.workload or _WORKLOADS:
        for name in args.optimizer or _OPTIMIZERS:
            _output.print_report(measure(args.folder, name, _WORKLOADS[workload], args.rounds))


if __name__ == "__main__":
    main()
