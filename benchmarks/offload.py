"""Times training with the optimizer on the host: ``python -m benchmarks.offload [--check]``.

A transformer with bfloat16 weights trains on an accelerator. Its optimizer runs there, or on the
host, with copies that overlap or not. ``--check`` instead compares the weights after each step, bit
for bit, with those of an ordinary optimizer on the host that gets the same gradients; under
torchrun it checks DistributedDataParallel. Without an accelerator, use ``--device cpu``, where
nothing overlaps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from benchmarks import _offload_check, _output
from benchmarks._command import positive
from benchmarks._offload import BF16, SIZES, Counted, new_model
from benchmarks._output import Table
from fusedoptim import FusedAdamW
from fusedoptim.offload import OffloadOptimizer

LR = 1e-5


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def naive(params: list[Tensor]) -> tuple[Callable[[], None], Optimizer]:
    """FusedAdamW on the host, written without OffloadOptimizer: copy, step, copy."""
    host = [p.detach().cpu().requires_grad_() for p in params]
    optimizer = FusedAdamW(host, lr=LR, split=True)

    def step() -> None:
        for p, h in zip(params, host):
            h.grad = None if p.grad is None else p.grad.cpu()
        optimizer.step()
        for p, h in zip(params, host):
            p.detach().copy_(h.detach())

    return step, optimizer


def offloaded(cls: Callable[..., Optimizer], **options: Any) -> Callable[[list[Tensor]], Any]:
    """A function that makes a step whose optimizer is on the host."""

    def make(params: list[Tensor]) -> tuple[Callable[[], Any], Optimizer]:
        optimizer = OffloadOptimizer(params, cls, lr=LR, **options)
        return optimizer.step, optimizer

    return make


def on_device(params: list[Tensor]) -> tuple[Callable[[], Any], Optimizer]:
    """AdamW from torch, on the device."""
    optimizer = AdamW(params, lr=LR, fused=True)
    return optimizer.step, optimizer


CONTENDERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "no step": lambda params: (lambda: None, None),
    "torch fused AdamW on the device": on_device,
    "copy, FusedAdamW split, copy": naive,
    "offload, FusedAdamW split, no overlap": offloaded(
        FusedAdamW, split=True, bucket_cap_mb=2**20, copy_in_backward=False
    ),
    "offload, FusedAdamW split, copies in backward only": offloaded(
        FusedAdamW, split=True, bucket_cap_mb=2**20
    ),
    "offload, FusedAdamW split": offloaded(FusedAdamW, split=True),
    "offload, FusedAdamW split, buckets of 25 MiB": offloaded(
        FusedAdamW, split=True, bucket_cap_mb=25
    ),
    "offload, FusedAdamW split, bfloat16 state": offloaded(
        FusedAdamW, split=True, state_dtype=BF16
    ),
    "offload, FusedAdamW split, float8 state": offloaded(
        FusedAdamW, split=True, state_dtype="float8"
    ),
    "offload, torch fused AdamW": offloaded(AdamW, fused=True),
}


def time_one(
    make: Callable[[list[Tensor]], Any],
    size: str,
    device: torch.device,
    rounds: int,
    counted: Counted,
) -> tuple[list[float], list[float], int]:
    """Seconds of each iteration, of its step() call alone, and the device's peak memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = new_model(size, device)
    tokens = torch.randint(SIZES[size][0], (8, 512 if size != "tiny" else 16), device=device)
    params: list[Tensor] = list(model.parameters())
    step, _optimizer = make(params)
    iterations, steps = [], []
    for i in range(rounds + 2):
        if i == 2:  # the first iterations create state and buffers
            counted.reset()
        synchronize(device)
        start = time.perf_counter()
        for p in params:
            p.grad = None
        model(tokens).backward()
        before = time.perf_counter()
        step()
        after = time.perf_counter()
        synchronize(device)
        if i >= 2:
            iterations.append(time.perf_counter() - start)
            steps.append(after - before)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return iterations, steps, peak


def host_alone(size: str, rounds: int) -> None:
    """Print the time of the host's step alone, without a device and in ordinary memory."""
    for name, cls, options in (
        ("FusedAdamW split", FusedAdamW, {"split": True}),
        ("FusedAdamW split, float8 state", FusedAdamW, {"split": True, "state_dtype": "float8"}),
        ("torch fused AdamW", AdamW, {"fused": True}),
    ):
        gc.collect()
        shapes = [p.shape for p in new_model(size, torch.device("meta")).parameters()]
        params = [torch.full(shape, 1e-2, dtype=BF16, requires_grad=True) for shape in shapes]
        for p in params:
            p.grad = torch.full_like(p, 1e-3)
        optimizer = cls(params, lr=LR, **options)
        seconds = []
        for _ in range(rounds + 2):
            start = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        print(
            f"{size}, host alone, {name}: min {min(seconds[2:]) * 1e3:.1f}, "
            f"median {statistics.median(seconds[2:]) * 1e3:.1f} ms",
            flush=True,
        )


def bus(device: torch.device) -> str:
    """The speed of a copy of 256 MiB each way, from and to pinned memory."""
    if device.type == "cpu":
        return "no bus"
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    speeds = []
    for target, source in ((host, there), (there, host)):
        seconds = []
        for _ in range(5):
            synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        speeds.append(2**28 / min(seconds) / 1e9)
    return "device to host {:.1f} GB/s, host to device {:.1f} GB/s".format(*speeds)


def measure(size: str, device: torch.device, rounds: int, names: Sequence[str]) -> Table:
    """Time all contenders, one after the other."""
    count = sum(p.numel() for p in new_model(size, torch.device("meta")).parameters())
    rows = []
    for name in names:
        make = CONTENDERS[name]
        with Counted() as counted:
            iterations, steps, peak = time_one(make, size, device, rounds, counted)
        times = [f"{f(s) * 1e3:.1f}" for s in (iterations, steps) for f in (min, statistics.median)]
        host = [f"{t / rounds * 1e3:.1f}" for t in (counted.updated, counted.waited)]
        moved = [f"{b / count / rounds:.2f}" for b in (counted.fetched, counted.sent)]
        rows.append([name, *times, *host, *moved, f"{peak / 2**30:.2f}"])
        print(*rows[-1], sep="; ", flush=True)
    header = ["ms", "iteration min", "median", "step() min", "median"]
    header += ["update on the host", "host waits"]
    header += ["bytes a weight to host", "to device", "peak GiB on device"]
    title = f"{size}: {count:,} bfloat16 weights, {rounds} iterations of 8 x 512 tokens"
    return Table(title, header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="compare bits; measure nothing")
    parser.add_argument("--size", action="append", choices=SIZES, help="repeatable")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="repeatable")
    parser.add_argument("--rounds", type=positive, default=10, help="iterations of each contender")
    parser.add_argument("--device", help="by default the accelerator")
    args = parser.parse_args()
    device = torch.device(
        args.device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    )
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    if args.check:
        _offload_check.main(device)
        return
    _output.print_machine()
    print(
        f"torch {torch.__version__} on {device}, {torch.get_num_threads()} threads; {bus(device)}"
    )
    for size in args.size or ("bert-base", "1.3B"):
        host_alone(size, args.rounds)
        names = args.contender or list(CONTENDERS)
        _output.print_table(measure(size, device, args.rounds, names))


if __name__ == "__main__":
    main()
