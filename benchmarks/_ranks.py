"""Measurements on each rank of a process group; ``_fresh.measured_by_ranks`` starts the ranks.

All ranks begin each step together, as after a collective: they share the memory's bandwidth.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._shapes import MODELS, Shape
from benchmarks._workloads import LR
from fusedoptim import FusedAdamW, FusedLamb

Spans = list[tuple[float, float]]
"""The begin and end of each step, by a clock that all processes share."""
_STEPS, _WARM_UP = 20, 3
_LAYERS = 8
"""The layers of a sharded model; FSDP2 gathers each as a whole."""
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "FusedAdamW": FusedAdamW,
    "FusedLamb": FusedLamb,
    "torch fused AdamW": lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True),
}
TINY = "300x1000"
"""A list of shapes for which the cost of a DTensor shows."""


class _Parameters(nn.Module):
    """Parameters of given shapes, whose gradients are made by a pass over each."""

    def __init__(self, shapes: list[Shape]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([p.sum() for p in self.params]).sum() * x


def ddp_step(optimizer: str, model: str, wrapped: str) -> Spans:
    """Times of steps with DDP's gradients, or, if ``wrapped`` is "no", with the rank's own."""
    module: nn.Module = _Parameters(_shapes(model))
    if wrapped == "yes":
        module = DistributedDataParallel(module, gradient_as_bucket_view=True)
    module(torch.ones(())).backward()
    return _timed(OPTIMIZERS[optimizer](list(module.parameters()), lr=LR).step)


def sharded_step(optimizer: str, model: str, wrapped: str) -> Spans:
    """Times of steps of FSDP2's parameters; if ``wrapped`` is "no", of plain copies of shards."""
    module = fully_shard(_Parameters(_shapes(model)), mesh=_mesh())
    module(torch.ones(())).backward()  # its gradients have the specifications of its parameters
    params = list(module.parameters())
    if wrapped == "no":
        shards = [p.to_local() for p in params]
        params = [nn.Parameter(shard.detach().clone()) for shard in shards]
        for p in params:
            p.grad = torch.ones_like(p)
    return _timed(OPTIMIZERS[optimizer](params, lr=LR).step)


def all_reduce(elements: str) -> Spans:
    """Times of a sum over the ranks of ``elements`` float32 numbers."""
    values = torch.ones(int(elements))
    return _timed(lambda: distributed.all_reduce(values))


def state_memory(model: str, wrapped: str) -> dict[str, int]:
    """Bytes of Adam's state, and the rise of the resident memory in its first step.

    If ``wrapped`` is "yes", ZeroRedundancyOptimizer divides the state.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    params = list(_Parameters(_shapes(model)).parameters())
    for p in params:
        p.grad = torch.ones_like(p)
    warm = FusedAdamW([nn.Parameter(torch.ones(1))], lr=LR)  # starts the driver
    warm.param_groups[0]["params"][0].grad = torch.ones(1)
    warm.step()
    optimizer: Any
    if wrapped == "yes":
        optimizer = ZeroRedundancyOptimizer(params, optimizer_class=FusedAdamW, lr=LR)
        own = optimizer.optim
    else:
        own = optimizer = FusedAdamW(params, lr=LR)
    before = _resident()
    optimizer.step()
    rise = _resident() - before
    states = [value for state in own.state.values() for value in state.values()]
    return {"state": sum(value.nbytes for value in states), "rise": rise}


def sent(way: str, is_split: str) -> int:
    """Bytes that a training iteration passes to its collectives: FSDP2's, or DDP's."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if is_split == "yes" else torch.float32
    layers = [nn.Linear(256, 256).to(dtype) for _ in range(_LAYERS)]
    model: nn.Module = nn.Sequential(*layers)
    buckets: list[int] = []
    if way == "FSDP2":
        for layer in layers:
            fully_shard(layer, mesh=_mesh())
        fully_shard(model, mesh=_mesh())
    else:
        model = DistributedDataParallel(model)

        def counted(bucket: Any) -> Any:
            buckets.append(bucket.buffer().nbytes)
            return default_hooks.allreduce_hook(distributed.group.WORLD, bucket)

        # A lambda, as it has no annotations: torch would compare them with strings.
        model.register_comm_hook(None, lambda state, bucket: counted(bucket))
    optimizer = FusedAdamW(model.parameters(), lr=LR, split=is_split == "yes")
    with _counted_collectives() as counts:
        model(torch.randn(4, 256, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return sum(buckets) if way == "DDP" else counts[0]


@contextlib.contextmanager
def _counted_collectives() -> Iterator[list[int]]:
    """Count the bytes of the whole tensors that collectives gather and reduce."""
    counts = [0]

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "c10d":
                tensors = [a for a in args if isinstance(a, Tensor)]
                counts[0] += max((t.nbytes for t in tensors), default=0)
            return func(*args, **(kwargs or {}))

    with Counting():
        yield counts


def _mesh() -> DeviceMesh:
    """The mesh of all ranks, on the CPU even if there is a GPU."""
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def _shapes(model: str) -> list[Shape]:
    return [(1000,)] * 300 if model == TINY else MODELS[model]()


def _timed(step: Callable[[], object]) -> Spans:
    spans = []
    for _ in range(_WARM_UP + _STEPS):
        distributed.barrier()
        start = time.monotonic()
        step()
        spans.append((start, time.monotonic()))
    return spans[_WARM_UP:]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
