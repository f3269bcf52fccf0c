"""Times training with the optimizer on the host: ``python -m benchmarks.offload [--check]``.

A transformer with bfloat16 weights on an accelerator; its optimizer there, or on the host, with
copies that overlap or not. ``--check`` instead compares the weights after each step, bit for bit,
with those of an ordinary optimizer on the host that gets the same gradients. Without an accelerator
both run with ``--device cpu``, where nothing overlaps.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from benchmarks import _output
from benchmarks._output import Table
from fusedoptim import FusedAdagrad, FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.offload import OffloadOptimizer
from fusedoptim.offload._bucket import Bucket
from fusedoptim.offload._link import Link

LR = 1e-5
SIZES = {"tiny": (1_000, 64, 2), "bert-base": (30_522, 768, 12), "1.3B": (50_257, 2048, 24)}
"""Words, width and layers."""
BF16 = torch.bfloat16


class Transformer(nn.Module):
    """Predicts words, with torch's own layers."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    width, width // 64, 4 * width, 0.0, batch_first=True, norm_first=True
                )
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of predicting each word from all."""
        logits = self.head(self.layers(self.words(tokens)))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def new_model(size: str, device: torch.device, dtype: torch.dtype = BF16) -> Transformer:
    """A model with weights that are the same each time."""
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Transformer(*SIZES[size])
    finally:
        torch.set_default_dtype(default)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Counted:
    """Counts the bytes that go each way, and the seconds that the host waits and updates."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.fetched = self.sent = 0
        self.waited = self.updated = 0.0

    def __enter__(self) -> Counted:
        own_fetch, own_send, own_wait = Link.fetch, Link.send, Link.wait
        own_update = Bucket.update

        def wait(event: Any) -> None:
            start = time.perf_counter()
            own_wait(event)
            self.waited += time.perf_counter() - start

        def update(bucket: Bucket, *args: Any) -> None:
            start, waited = time.perf_counter(), self.waited
            own_update(bucket, *args)
            self.updated += time.perf_counter() - start - (self.waited - waited)

        def fetch(link: Link, flat: Tensor | None, targets: list[Tensor], sources: Any) -> None:
            self.fetched += sum(target.nbytes for target in targets)
            own_fetch(link, flat, targets, sources)

        def send(link: Link, flat: Tensor | None, sources: Any, targets: list[Tensor]) -> None:
            self.sent += sum(target.nbytes for target in targets)
            own_send(link, flat, sources, targets)

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(
            mock.patch.multiple(Link, fetch=fetch, send=send, wait=staticmethod(wait))
        )
        self._patches.enter_context(mock.patch.object(Bucket, "update", update))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()


# Correctness

CASES: tuple[tuple[str, torch.dtype, Callable[..., Optimizer], dict[str, Any]], ...] = (
    ("FusedAdamW", torch.float32, FusedAdamW, {}),
    ("FusedAdamW", BF16, FusedAdamW, {}),
    ("FusedAdamW, split", BF16, FusedAdamW, {"split": True}),
    ("FusedAdamW, split from float32", torch.float32, FusedAdamW, {"split": True}),
    ("FusedLamb, split", BF16, FusedLamb, {"split": True}),
    ("SplitSGD", BF16, SplitSGD, {"momentum": 0.9}),
    ("FusedSGD", torch.float16, FusedSGD, {"momentum": 0.9}),
    ("FusedAdagrad", torch.float32, FusedAdagrad, {}),
    ("torch AdamW", torch.float32, AdamW, {"fused": True}),
    ("torch AdamW", BF16, AdamW, {"foreach": True}),
)


@contextlib.contextmanager
def delays(device: torch.device, optimizer: OffloadOptimizer) -> Iterator[None]:
    """Keep the device and its copies busy, so that whoever does not wait reads old values."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)
        yield
        for link in optimizer._links.values():
            assert link._stream is not None
            with link._stream:
                torch.cuda._sleep(20_000_000)
    else:
        yield


def check(device: torch.device) -> None:
    """Raise unless the weights on ``device`` have the bits of a step on the host."""
    for name, dtype, cls, options in CASES:
        # 2e-2 MiB: many buckets, of several parameters and of one
        for cap, in_backward in ((2e-2, True), (25, True), (2e-2, False)):
            model = new_model("tiny", device, torch.float32).to(dtype)
            params = list(model.parameters())
            host = [p.detach().cpu().clone().requires_grad_() for p in params]
            expected = cls(host, lr=1e-3, **options)
            optimizer = OffloadOptimizer(
                params, cls, lr=1e-3, bucket_cap_mb=cap, copy_in_backward=in_backward, **options
            )
            for step in range(6):
                optimizer.zero_grad(set_to_none=step % 3 != 0)
                with Counted() as counted, delays(device, optimizer):
                    for _ in range(2 if step == 1 else 1):
                        model(torch.randint(1000, (2, 16), device=device)).backward()
                    if step == 2:
                        nn.utils.clip_grad_norm_(params, 0.1)
                    if step == 4:
                        params[3].grad = None
                with Counted() as rest:
                    optimizer.step()
                for p, h in zip(params, host):
                    h.grad = None if p.grad is None else p.grad.cpu()
                expected.step()
                for p, h in zip(params, host):
                    assert torch.equal(p.detach().cpu(), h), (name, dtype, cap, step)
                if step == 5:
                    size = sum(p.nbytes for p in params)
                    assert counted.fetched + rest.fetched == rest.sent == size, (name, dtype)
                    assert counted.fetched == (size if in_backward else 0), (name, dtype)
                    with torch.no_grad():
                        params[0].mul_(0.5), host[0].mul_(0.5)
                    optimizer.load_state_dict(expected.state_dict())
                    expected.load_state_dict(optimizer.state_dict())
        print(f"{name}, {dtype}: the bits of the step on the host", flush=True)
    check_beside_cpu(device)
    check_clipping(device)


def check_beside_cpu(device: torch.device) -> None:
    """Raise unless parameters on the CPU are updated beside those on ``device``."""
    there = torch.ones(1000, device=device, requires_grad=True)
    params = [there, torch.ones(1000, requires_grad=True)]
    optimizer = OffloadOptimizer(params, FusedAdamW, lr=0.1, max_grad_norm=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        losses = [(p.to(device) * torch.arange(1000, device=device)).sum() for p in params]
        torch.stack(losses).sum().backward()
        optimizer.step()
        assert torch.equal(there.cpu(), params[1])
    print("a parameter on the CPU beside one on the device: equal", flush=True)


def check_clipping(device: torch.device) -> None:
    """Raise unless ``max_grad_norm`` does what it does on the host, up to rounding."""
    model = new_model("tiny", device, torch.float32)
    params = list(model.parameters())
    host = [p.detach().cpu().clone().requires_grad_() for p in params]
    expected = FusedSGD(host, lr=1.0, max_grad_norm=1e-2)
    optimizer = OffloadOptimizer(params, FusedSGD, lr=1.0, max_grad_norm=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(1000, (2, 16), device=device)).backward()
        optimizer.step()
        for p, h in zip(params, host):
            h.grad = None if p.grad is None else p.grad.cpu()
        expected.step()
        for p, h in zip(params, host):
            torch.testing.assert_close(p.detach().cpu(), h.detach())
    print("max_grad_norm: that of the host, up to rounding", flush=True)


# Speed


def naive(params: list[Tensor]) -> tuple[Callable[[], None], Optimizer]:
    """FusedAdamW on the host as written without this package's help: copy, step, copy."""
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
    """Make a step with its optimizer on the host."""

    def make(params: list[Tensor]) -> tuple[Callable[[], Any], Optimizer]:
        optimizer = OffloadOptimizer(params, cls, lr=LR, **options)
        return optimizer.step, optimizer

    return make


def on_device(params: list[Tensor]) -> tuple[Callable[[], Any], Optimizer]:
    """AdamW of torch on the device."""
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
        if i == 2:  # the first iterations make state and buffers
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
    """Print the time of the host's step alone: no device, ordinary memory."""
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
    title = f"{size}: {count:,} bfloat16 weights, {rounds} iterations of 8 x 512 words"
    return Table(title, header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="compare bits; measure nothing")
    parser.add_argument("--size", action="append", choices=SIZES, help="repeatable")
    parser.add_argument("--contender", action="append", choices=CONTENDERS, help="repeatable")
    parser.add_argument("--rounds", type=int, default=10, help="iterations of each contender")
    parser.add_argument("--device", help="by default the accelerator")
    args = parser.parse_args()
    device = torch.device(
        args.device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    )
    if device.type != "cpu" and device.index is None:
        device = torch.device(device.type, 0)
    if args.check:
        check(device)
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
