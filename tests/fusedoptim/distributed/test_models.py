"""Training with torch's ways to shard a model: FSDP2, HSDP, tensor parallel, and combinations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fusedoptim import SplitSGD
from tests.fusedoptim.distributed.helpers import Block, computed_once, size, square_mesh, whole
from tests.fusedoptim.distributed.processes import on_processes
from tests.fusedoptim.distributed.training import LIMIT, SPLITS, checked_updates
from tests.optimizer_cases import ADAMW, LAMB, WHOLE_CASES, OptimizerCase
from tests.tolerances import Exact, assert_as_exact

STEPS = 3
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def divided(model: nn.Module, mesh: Any) -> nn.Module:
    """A tensor-parallel model with a sequence-parallel norm, and a head that is whole."""
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    return parallelize_module(model, mesh, plan)


def sharded(model: nn.Module, mesh: Any, **policies: Any) -> nn.Module:
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **policies)
    return fully_shard(model, mesh=mesh, **policies)


def fsdp(model: nn.Module, **policies: Any) -> tuple[nn.Module, int, int]:
    mesh = init_device_mesh("cpu", (size(),))
    return sharded(model, mesh, **policies), mesh.get_local_rank(), size()


def tensor_parallel(model: nn.Module) -> tuple[nn.Module, int, int]:
    return divided(model, init_device_mesh("cpu", (size(),))), 0, 1


def hsdp(model: nn.Module) -> tuple[nn.Module, int, int]:
    return sharded(model, square_mesh()), torch.distributed.get_rank(), size()


def both(model: nn.Module) -> tuple[nn.Module, int, int]:
    mesh = square_mesh()
    model = sharded(divided(model, mesh["columns"]), mesh["rows"])
    return model, mesh.get_local_rank("rows"), 2


def new_model() -> nn.Module:
    torch.manual_seed(1)
    return Block().double()


def train(
    model: nn.Module, optimizer: Any, part: int = 0, parts: int = 1, limit: float | None = None
) -> None:
    """Take steps on part ``part`` of each batch, which is cut into ``parts`` parts."""
    generator = torch.Generator().manual_seed(2)
    dtype = next(model.parameters()).dtype
    for _ in range(STEPS):
        batch = torch.randn(4, 4, 6, generator=generator, dtype=torch.float64).to(dtype)
        optimizer.zero_grad()
        model(batch.chunk(parts)[part]).square().mean().backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()


def cases() -> tuple[OptimizerCase, ...]:
    """Every class in two processes; in four, one class that needs norms and one that does not."""
    return WHOLE_CASES if size() == 2 else (ADAMW, LAMB)


@functools.cache
def trained_alone(name: str, limit: float | None) -> Exact:
    """The weights of a whole model after training in float64."""
    (case,) = (case for case in WHOLE_CASES if case.name == name)

    def exact() -> list[Tensor]:
        model = new_model()
        train(model, case.make_reference(model.parameters(), **case.kwargs[-1]), limit=limit)
        return [p.detach() for p in model.parameters()]

    return computed_once(exact)


def check(
    case: OptimizerCase,
    wrap: Callable[[nn.Module], tuple[nn.Module, int, int]],
    limit: float | None = None,
) -> None:
    """Train a sharded float32 model, and compare it with the whole one."""
    model, part, parts = wrap(new_model().float())
    optimizer = case.make(model.parameters(), **case.kwargs[-1], max_grad_norm=limit)
    train(model, optimizer, part, parts)
    weights = [whole(p) for p in model.parameters()]
    assert_as_exact(weights, trained_alone(case.name, limit), torch.float32)


def check_updates(
    case: OptimizerCase,
    wrap: Callable[[nn.Module], tuple[nn.Module, int, int]],
    *,
    in_step: bool = True,
) -> None:
    """Train a model whose forward pass may compute in bfloat16, and check the updates alone.

    Gradients are clipped ``in_step``, or by torch.
    """
    model, part, parts = wrap(new_model().to(torch.bfloat16 if case.is_split else torch.float32))
    in_ours, by_torch = (LIMIT, None) if in_step else (None, LIMIT)
    optimizer = case.make(model.parameters(), **case.kwargs[-1], max_grad_norm=in_ours)
    with checked_updates(case, optimizer, in_ours):
        train(model, optimizer, part, parts, by_torch)


@on_processes(2)
def test_fsdp_with_mixed_precision() -> None:
    """Gradients are clipped to a norm of all, in the step or by torch."""
    wrap = functools.partial(fsdp, mp_policy=MIXED)
    for case in (*WHOLE_CASES, *SPLITS):
        check_updates(case, wrap)
    for case in (LAMB, *SPLITS[:2]):
        check_updates(case, wrap, in_step=False)


@on_processes(2)
def test_fsdp_with_offload() -> None:
    wrap = functools.partial(fsdp, offload_policy=OFFLOAD)
    for case in WHOLE_CASES:
        check(case, wrap)
    for case in SPLITS:
        check_updates(case, wrap)


@on_processes(2, 4)
def test_split_weights() -> None:
    for case in SPLITS if size() == 2 else SPLITS[1:]:
        for wrap in (fsdp, tensor_parallel) if size() == 2 else (hsdp, both):
            check_updates(case, wrap)
    check_updates(SPLITS[0], fsdp, in_step=False)


@on_processes(2, 4)
def test_fsdp() -> None:
    for case in cases():
        check(case, fsdp)
        check(case, fsdp, limit=0.1)


@on_processes(2, 4)
def test_tensor_parallel() -> None:
    for case in cases():
        check(case, tensor_parallel)
        check(case, tensor_parallel, limit=0.1)


@on_processes(4)
def test_hsdp() -> None:
    for case in cases():
        check(case, hsdp, limit=0.1)


@on_processes(4)
def test_fsdp_with_tensor_parallel() -> None:
    for case in cases():
        check(case, both)
        check(case, both, limit=0.1)


@on_processes(2)
def test_split_weights_of_a_model_that_had_no_memory() -> None:
    """An optimizer that was made before ``to_empty()`` takes the steps of one made after it."""
    trained = []
    for is_first in (True, False):
        with torch.device("meta"):
            model = Block().bfloat16()
        model, part, parts = fsdp(model)
        optimizer = SplitSGD(model.parameters(), lr=0.1, momentum=0.9) if is_first else None
        model.to_empty(device="cpu")
        torch.manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()
        optimizer = optimizer or SplitSGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, optimizer, part, parts)
        trained.append([*map(whole, model.parameters()), *map(whole, optimizer.master_params())])
    assert all(torch.equal(one, other) for one, other in zip(*trained, strict=True))
