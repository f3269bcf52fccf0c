"""Times steps in several processes on this machine: ``python -m benchmarks.ranks [--save]``.

Each rank of a gloo process group is a process, and each side of a comparison has its own processes;
the sides alternate. A step lasts until the last rank has taken it.

ddp-N        torch's fused AdamW and ours with DDP's gradients on N ranks, each with one thread, as
             torchrun sets it, and with its part of the cores
in-ddp       the step with DDP's gradients, as a ratio to the same parameters without DDP
fsdp-...     the step of FSDP2's parameters on 4 ranks, as a ratio to the same shards as plain
             tensors, and the time of one collective
zero         Adam's state on each of 2 ranks with ZeroRedundancyOptimizer, as a share of the whole
wire         bytes of an iteration's collectives with split weights, as a ratio to float32
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import _command
from benchmarks._fresh import measured_by_ranks
from benchmarks._harness import Report, Timing, powers_up_to
from benchmarks._output import Table
from benchmarks._ranks import TINY

OURS, TORCH, LAMB = "FusedAdamW", "torch fused AdamW", "FusedLamb"
_CORES = len(os.sched_getaffinity(0))
_ROUNDS = 3
_SHARDS = 4
_LARGE = "resnet50"


class Side(NamedTuple):
    """One side of a comparison."""

    name: str
    peer: str | None
    threads: int
    function: str
    """The name of a function of :mod:`benchmarks._ranks`."""
    arguments: tuple[str, ...]


def compared(workload: str, ranks: int, sides: Sequence[Side], rounds: int | None) -> Report:
    """Times from the first rank's start of a step to the last rank's end, on ``ranks`` ranks."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _, (side, found) in itertools.product(range(rounds or _ROUNDS), zip(sides, seconds)):
        by_rank = measured_by_ranks(ranks, side.threads, side.function, *side.arguments)
        for spans in zip(*by_rank):
            starts, ends = zip(*spans)
            found.append(max(ends) - min(starts))
    timings = [Timing(side.name, found, peer=side.peer) for side, found in zip(sides, seconds)]
    return Report(workload, timings)


def ddp(ranks: int, rounds: int | None) -> Report:
    sides = []
    for threads in sorted({1, max(_CORES // ranks, 1)}):
        suffix = f", {threads} thread{'s' * (threads > 1)}"
        for name, peer in ((TORCH, None), (OURS, TORCH + suffix)):
            sides.append(Side(name + suffix, peer, threads, "ddp_step", (name, _LARGE, "yes")))
    return compared(f"{_LARGE}, DDP on {ranks} ranks", ranks, sides, rounds)


def in_ddp(rounds: int | None) -> Report:
    threads = max(_CORES // 2, 1)
    sides = [
        Side("plain", None, threads, "ddp_step", (OURS, _LARGE, "no")),
        Side("in DDP", "plain", threads, "ddp_step", (OURS, _LARGE, "yes")),
    ]
    return compared(f"{_LARGE}, FusedAdamW on 2 ranks", 2, sides, rounds)


def fsdp(model: str, rounds: int | None) -> Report:
    threads = max(_CORES // _SHARDS, 1)
    sides = []
    for name in (OURS, LAMB):
        plain = f"{name}, plain shards"
        sides.append(Side(plain, None, threads, "sharded_step", (name, model, "no")))
        sides.append(Side(f"{name}, FSDP2", plain, threads, "sharded_step", (name, model, "yes")))
    sides.append(Side("one collective", None, threads, "all_reduce", ("600",)))
    return compared(f"{model}, FSDP2 on {_SHARDS} ranks", _SHARDS, sides, rounds)


def zero(rounds: int | None) -> Table:
    """Measure the state of each rank; further rounds would be identical."""
    del rounds
    rows = []
    for model in (_LARGE, "bert-base"):
        (whole,) = measured_by_ranks(1, 1, "state_memory", model, "no")
        for rank, part in enumerate(measured_by_ranks(2, 1, "state_memory", model, "yes")):
            sizes = (f"{part[name] / 1e6:.1f} MB" for name in part)
            ratios = (f"{part[name] / whole[name]:.2%}" for name in part)
            rows.append([model, str(rank), *sizes, *ratios])
    header = ["model", "rank", "state", "rise of memory", "of the whole state", "of its rise"]
    return Table("ZeroRedundancyOptimizer over 2 ranks, FusedAdamW", header, rows)


def wire(rounds: int | None) -> Table:
    """Count the bytes of the collectives; further rounds would be identical."""
    del rounds
    rows = []
    for way in ("DDP", "FSDP2"):
        whole, split = (
            measured_by_ranks(2, 1, "sent", way, is_split)[0] for is_split in ("no", "yes")
        )
        rows.append([way, f"{whole:,}", f"{split:,}", f"{split / whole:.3f}"])
    header = ["way", "float32", "split", "ratio"]
    return Table(
        "bytes of the tensors that an iteration's collectives reduce and gather", header, rows
    )


if __name__ == "__main__":
    counts = powers_up_to(max(_CORES, 4))
    workloads: dict[str, _command.Measure] = {
        **{f"ddp-{count}": functools.partial(ddp, count) for count in counts},
        "in-ddp": in_ddp,
        **{f"fsdp-{model}": functools.partial(fsdp, model) for model in (_LARGE, TINY)},
        "zero": zero,
        "wire": wire,
    }
    _command.run("ranks", __doc__, workloads)
