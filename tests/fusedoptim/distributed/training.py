"""A small model, its batches, and checks of weights after training with them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fusedoptim import FusedAdamW, FusedLamb
from tests.fusedoptim.distributed.helpers import Block, computed_once, rank, size, whole
from tests.fusedoptim.helpers import params_of
from tests.optimizer_cases import SPLIT_CASES, SPLIT_SGD, WHOLE_CASES, OptimizerCase
from tests.tolerances import Exact, assert_as_exact, computed_exactly

BATCHES = 3
SPLITS = (SPLIT_SGD, *(case for case in SPLIT_CASES if case.cls in (FusedAdamW, FusedLamb)))
"""Classes of split weights: with little state, with more, and with norms."""
LIMIT = 0.01
"""A norm that is smaller than that of every step's gradients."""


def new_model() -> nn.Module:
    torch.manual_seed(4)
    return Block()


def batches(parts: int = 1, part: int = 0, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(BATCHES):
        batch = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        yield batch.to(dtype).chunk(parts)[part]


def own_batches(dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """This process's part of each batch."""
    return batches(size(), rank(), dtype)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).float().square().mean()
    return loss


def train(model: nn.Module, optimizer: Any, clip: float | None = None) -> None:
    """Take steps, and let torch clip the gradients' norm to ``clip`` before each."""
    for batch in own_batches(next(model.parameters()).dtype):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@functools.cache
def trained_alone(name: str, limit: float | None) -> Exact:
    """The weights after one process has trained with whole batches."""
    (case,) = (case for case in WHOLE_CASES if case.name == name)

    def exact() -> list[Tensor]:
        model = new_model().double()
        optimizer = case.make_reference(model.parameters(), **case.kwargs[-1])
        for batch in batches(dtype=torch.float64):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    return computed_once(exact)


def assert_trained(model: nn.Module, case: OptimizerCase, limit: float | None = None) -> None:
    """Assert that the weights are those after training in one process."""
    weights = [whole(p) for p in model.parameters()]
    assert_as_exact(weights, trained_alone(case.name, limit), torch.float32)


def fsdp1(model: nn.Module) -> nn.Module:
    """The parameters become pieces of flat ones, without a mesh."""
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def make(case: OptimizerCase, model: nn.Module, **options: Any) -> Any:
    return case.make(model.parameters(), **case.kwargs[-1], **options)


@contextlib.contextmanager
def checked_updates(
    case: OptimizerCase, optimizer: Any, limit: float | None = None, is_alone: bool = False
) -> Iterator[None]:
    """Check the steps that are taken inside; their gradients may be rounded, and are recorded.

    Args:
        case: the optimizer's.
        optimizer: of whole or sharded parameters, split or not.
        limit: to which the optimizer clips.
        is_alone: whether each process has other parameters, and none is sharded.
    """
    params = params_of(optimizer)
    start = list(map(whole, optimizer.master_params()))
    gradients: list[list[Tensor]] = []

    def exact() -> list[Tensor]:
        values = [nn.Parameter(value.double()) for value in start]
        reference = case.make_reference(values, **case.kwargs[-1])
        for step in gradients:
            for p, grad in zip(values, step, strict=True):
                p.grad = grad.double()
            if limit is not None:
                assert torch.nn.utils.clip_grad_norm_(values, limit) > limit
            reference.step()
        return [p.detach() for p in values]

    def record(*_: object) -> None:
        gradients.append([whole(p.grad).clone() for p in params])

    hook = optimizer.register_step_pre_hook(record)
    yield
    hook.remove()
    results = list(map(whole, optimizer.master_params()))
    assert len(gradients) == BATCHES
    expected = computed_exactly(exact, torch.float32) if is_alone else computed_once(exact)
    assert_as_exact(results, expected, torch.float32)
