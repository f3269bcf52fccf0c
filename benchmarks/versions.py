"""Times the steps of another version against today's: ``python -m benchmarks.versions FOLDER``.

FOLDER is a checkout of the other version, made by ``git worktree add --detach FOLDER COMMIT``. Both
versions run in one process, interleaved, over the same parameters, gradients and state. In separate
processes, times of equal steps of large tensors may differ, because their pages lie elsewhere.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from benchmarks import _harness, _output
from benchmarks._command import positive
from benchmarks._harness import Contender, Report, Timing
from benchmarks._shapes import MODELS
from benchmarks._workloads import (
    LARGE,
    LR,
    MOMENTUM,
    SMALL,
    WORKLOADS,
    Workload,
    small_network,
)

_TODAY = Path(__file__).parents[1]
_PACKAGES = ("fusedoptim", "allocator", "transforms")
_OPTIMIZERS = ("FusedSGD", "SplitSGD", "FusedAdagrad", "FusedAdam", "FusedAdamW", "FusedLamb")
_WORKLOADS = {workload.name: workload for workload in (SMALL, *WORKLOADS, LARGE)}


class _Version:
    """The packages in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder.resolve()
        self._modules: dict[str, ModuleType] = {}

    def select(self) -> None:
        """Make imports find these packages, including imports within functions."""
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(self._modules)
        sys.path[0] = str(self._folder)

    def optimizer(self, name: str, params: list[Tensor]) -> torch.optim.Optimizer:
        """An optimizer that has made its first step."""
        self.select()
        options = {"momentum": MOMENTUM} if name.endswith("SGD") else {}
        package = importlib.import_module("fusedoptim")
        assert Path(package.__path__[0]).parent == self._folder
        optimizer: torch.optim.Optimizer = getattr(package, name)(params, lr=LR, **options)
        optimizer.step()
        self._modules = _loaded()
        return optimizer


def _loaded() -> dict[str, ModuleType]:
    modules = sys.modules.items()
    return {name: module for name, module in modules if name.partition(".")[0] in _PACKAGES}


def measure(folder: Path, name: str, workload: Workload, rounds: int | None) -> Report:
    """Time the steps of one optimizer on one list.

    Each version goes first in half of the rounds. On 10,000 small tensors the second of two equal
    versions may take longer, because its tensors were made later.
    """
    versions = _Version(str(folder), folder), _Version("today", _TODAY)
    half = math.ceil((rounds or workload.rounds) / 2)
    forth = _times(versions, name, workload, half)
    back = _times(versions[::-1], name, workload, half)[::-1]
    timings = [a._replace(seconds=[*a.seconds, *b.seconds]) for a, b in zip(forth, back)]
    return Report(f"{name}, {workload.name}", timings)


def _times(
    versions: Sequence[_Version], name: str, workload: Workload, rounds: int
) -> list[Timing]:
    dtype = torch.bfloat16 if name == "SplitSGD" else torch.float32
    first = [torch.randn(s, dtype=dtype).requires_grad_() for s in MODELS[workload.name]()]
    lists = first, list(map(_alias, first))

    def make_gradients() -> None:
        for params in zip(*lists):
            grad = torch.randn_like(params[0], requires_grad=False) * 1e-3
            for param in params:
                param.grad = grad

    make_gradients()
    optimizers = [v.optimizer(name, params) for v, params in zip(versions, lists)]
    for theirs, own in zip(*lists):
        state = optimizers[0].state[theirs].items()
        optimizers[1].state[own].update({k: _alias(v) for k, v in state if k != "step"})
    runs_next = itertools.cycle([v for v in versions for _ in range(workload.lead + 1)])
    network = small_network()

    def before_step() -> None:
        next(runs_next).select()
        if workload.new_gradients:
            make_gradients()
        network()

    contenders = [Contender(v.name, o.step) for v, o in zip(versions, optimizers)]
    return _harness.time_interleaved(contenders, rounds, before_step, lead=workload.lead)


def _alias(tensor: Tensor) -> Tensor:
    """A tensor over the same memory, with its own count of writes."""
    return tensor.data.requires_grad_(tensor.requires_grad)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--rounds", type=positive)
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
