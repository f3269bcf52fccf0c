"""Compares the weights of OffloadOptimizer with those of a step on the host, bit for bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from benchmarks._offload import BF16, Counted, new_model
from fusedoptim import FusedAdagrad, FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.offload import OffloadOptimizer

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
    """Keep the device and its copies busy, so that code that does not wait reads old values."""
    if device.type == "cuda":
        torch.cuda._sleep(20_000_000)
        yield
        for link in optimizer._links.values():
            assert link._stream is not None
            with link._stream:
                torch.cuda._sleep(20_000_000)
    else:
        yield


def check_classes(device: torch.device) -> None:
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
                follow(params, host, expected, name, dtype, cap, step)
                if step == 5:
                    size = sum(p.nbytes for p in params)
                    assert counted.fetched + rest.fetched == rest.sent == size, (name, dtype)
                    assert counted.fetched == (size if in_backward else 0), (name, dtype)
                    with torch.no_grad():
                        params[0].mul_(0.5), host[0].mul_(0.5)
                    optimizer.load_state_dict(expected.state_dict())
                    expected.load_state_dict(optimizer.state_dict())
        print(f"{name}, {dtype}: the bits of the step on the host", flush=True)


def check_beside_cpu(device: torch.device) -> None:
    """Raise unless parameters on the CPU are updated together with those on ``device``."""
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
    """Raise unless ``max_grad_norm`` has the same effect as on the host, up to rounding."""
    model = new_model("tiny", device, torch.float32)
    params = list(model.parameters())
    host = [p.detach().cpu().clone().requires_grad_() for p in params]
    expected = FusedSGD(host, lr=1.0, max_grad_norm=1e-2)
    optimizer = OffloadOptimizer(params, FusedSGD, lr=1.0, max_grad_norm=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(1000, (2, 16), device=device)).backward()
        optimizer.step()
        step_on_host(params, host, expected)
        for p, h in zip(params, host):
            torch.testing.assert_close(p.detach().cpu(), h.detach())
    print("max_grad_norm: that of the host, up to rounding", flush=True)


class Alternating(nn.Module):
    """Layers on several devices alternately, as in a model that is too large for one."""

    def __init__(self, devices: list[torch.device]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(67, 67, device=devices[i % len(devices)]) for i in range(8)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Carry ``x`` from device to device."""
        for layer in self.layers:
            x = layer(x.to(layer.weight.device)).tanh()
        return x


def check_devices(devices: list[torch.device]) -> None:
    """Raise unless a model on several devices is updated like one on the host."""
    model = Alternating(devices).to(BF16)
    params = list(model.parameters())
    host = [p.detach().cpu().clone().requires_grad_() for p in params]
    expected = FusedAdamW(host, lr=1e-3, split=True)
    optimizer = OffloadOptimizer(params, FusedAdamW, lr=1e-3, split=True, bucket_cap_mb=2e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(16, 67, dtype=BF16)).square().mean().backward()
        optimizer.step()
        follow(params, host, expected)
    print(f"{len(devices)} devices in one model: the bits of the step on the host", flush=True)


def check_ddp(device: torch.device) -> None:
    """Raise unless each process of DDP has the bits of a step on the host, the same in all."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    for name, dtype, cls, options in CASES:
        model = new_model("tiny", device, torch.float32).to(dtype)
        ids = [device.index] if device.type != "cpu" else None
        params = list(model.parameters())
        host = [p.detach().cpu().clone().requires_grad_() for p in params]
        expected = cls(host, lr=1e-3, **options)
        # Before the wrapper, whose hooks parameters would lose when they are split.
        optimizer = OffloadOptimizer(params, cls, lr=1e-3, copy_in_backward=False, **options)
        # All processes have the same values: a broadcast would reset the lower halves.
        parallel = DistributedDataParallel(model, device_ids=ids, init_sync=False)
        for _ in range(4):
            optimizer.zero_grad()
            parallel(torch.randint(1000, (2, 16), device=device)).backward()
            optimizer.step()
            follow(params, host, expected)
            for p in params:
                first = p.detach().clone()
                distributed.broadcast(first, 0)
                assert torch.equal(first, p), (name, dtype, rank)
        del parallel  # before the process group
        if rank == 0:
            print(f"{name}, {dtype}, DDP of {size} processes: the bits of the step on the host")


def step_on_host(params: list[Any], host: list[Any], expected: Optimizer) -> None:
    """Take a step on the host with the gradients of ``params``."""
    for p, h in zip(params, host):
        h.grad = None if p.grad is None else p.grad.cpu()
    expected.step()


def follow(params: list[Any], host: list[Any], expected: Optimizer, *where: object) -> None:
    """Take the same step on the host; raise unless ``params`` got the same bits."""
    step_on_host(params, host, expected)
    for p, h in zip(params, host):
        assert torch.equal(p.detach().cpu(), h), where


def main(device: torch.device) -> None:
    """Run all checks that are possible on this machine and in this process."""
    if "RANK" in os.environ:  # under torchrun
        if device.type != "cpu":
            device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
            torch.accelerator.set_device_index(device.index)
        distributed.init_process_group()
        check_ddp(device)
        distributed.destroy_process_group()
        return
    check_classes(device)
    check_beside_cpu(device)
    check_clipping(device)
    count = torch.accelerator.device_count() if device.type != "cpu" else 1
    if count > 1:
        check_devices([torch.device(device.type, i) for i in range(count)])
