"""Norms and infinities over all processes: how many collectives a step takes, and when."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

import fusedoptim
from fusedoptim import FusedAdamW, FusedLamb, FusedSGD
from fusedoptim.offload import OffloadOptimizer
from tests.fusedoptim.distributed.helpers import (
    counted_collectives,
    flat_mesh,
    rank,
    square_mesh,
    whole,
)
from tests.fusedoptim.distributed.processes import on_processes
from tests.fusedoptim.distributed.training import (
    assert_trained,
    fsdp1,
    loss_of,
    make,
    new_model,
    own_batches,
    train,
)
from tests.fusedoptim.helpers import new_scaler
from tests.interrupts import InterruptAt
from tests.optimizer_cases import ADAGRAD, ADAMW, LAMB, WHOLE_CASES


def two_groups(mesh: Any, places: list[Any], **options: Any) -> FusedLamb:
    """A FusedLamb of two groups and dtypes; one parameter has no gradient, and one is whole."""
    torch.manual_seed(0)
    dtypes = torch.float32, torch.bfloat16, torch.float32
    params = [
        Parameter(distribute_tensor(torch.randn(6, 4).to(dtype), mesh, places)) for dtype in dtypes
    ]
    params.append(Parameter(torch.ones(3)))
    for p in params[:2] + params[3:]:
        p.grad = torch.full_like(p, 0.5)
    groups: list[Any] = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.1}]
    return FusedLamb(groups, **options)


@on_processes(2, 4)
def test_one_collective_in_a_step() -> None:
    for mesh, places in (
        (flat_mesh(), [Shard(0)]),
        (square_mesh(), [Replicate(), Shard(0)]),
        (square_mesh(), [Shard(0), Shard(0)]),
        (square_mesh(), [Shard(0), Shard(1)]),
    ):
        is_divided = mesh.size(mesh.ndim - 1) > 1 or places[0].is_shard()
        for norm, expected in ((None, 1), (1.0, 2)):
            optimizer = two_groups(mesh, places, max_grad_norm=norm)
            for step in range(2):  # in the first, processes agree on what they add up
                with counted_collectives() as counts:
                    optimizer.step()
                assert counts == [(expected + (step == 0)) * is_divided], (mesh, places)


@on_processes(2)
def test_none_where_no_norm_is_needed() -> None:
    p = Parameter(distribute_tensor(torch.randn(6), flat_mesh(), [Shard(0)]))
    q = Parameter(distribute_tensor(torch.randn(6), flat_mesh(), [Replicate()]))
    for optimizer in (FusedAdamW([p]), FusedLamb([q]), FusedSGD([q], max_grad_norm=1.0)):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        with counted_collectives() as counts:
            optimizer.step()
        assert counts == [0]


@on_processes(2)
def test_process_without_gradients_takes_part() -> None:
    """A process whose shard has no gradient, such as an unused expert's, joins the collective."""
    mesh = flat_mesh()
    p = Parameter(distribute_tensor(torch.full((4,), 2.0), mesh, [Shard(0)]))
    optimizer = FusedLamb([p], lr=1.0, max_grad_norm=100.0)
    if rank() == 0:
        p.grad = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    optimizer.step()
    # Only the part with a gradient counts: p's norm is 2 sqrt 2, and the update's is sqrt 2.
    torch.testing.assert_close(whole(p), torch.tensor([0.0, 0.0, 2.0, 2.0]), rtol=0, atol=1e-6)


def scaled(p: Tensor, value: float, bad: bool) -> Tensor:
    """A gradient of ``value``, and of infinities on the second process if it is ``bad``."""
    grad = torch.full_like(p, value)
    if bad and rank() == 1:
        grad.to_local().fill_(torch.inf)
    return grad


@on_processes(2)
def test_step_of_a_scaler_without_gradients() -> None:
    """Of the infinities of no gradients, torch passes the sum of an empty list, an int."""
    for case in WHOLE_CASES:
        p = Parameter(distribute_tensor(torch.ones(4), flat_mesh(), [Shard(0)]))
        optimizer = case.make([p], lr=0.1, max_grad_norm=1.0)
        scaler = new_scaler(4.0)
        scaler.step(optimizer)
        assert whole(p).eq(1).all()


@on_processes(2)
def test_infinity_of_one_process_skips_the_step_of_all() -> None:
    """All skip the step even if torch's reduction by the first gradient's placements misses it."""
    mesh = flat_mesh()
    for case, first, norm in itertools.product(WHOLE_CASES, (Shard(0), Replicate()), (None, 1.0)):
        params = [
            Parameter(distribute_tensor(torch.ones(4), mesh, [placement]))
            for placement in (first, Shard(0))
        ]
        optimizer = case.make(params, lr=0.1, max_grad_norm=norm)
        for bad in (False, True, False):
            before = [whole(p).clone() for p in params]
            scaler = new_scaler(4.0)
            for p in params:
                p.grad = scaled(p, 4.0, bad and p is params[1])
            scaler.step(optimizer)
            scaler.update()
            if first.is_shard():
                assert scaler.get_scale() == (2.0 if bad else 4.0)
            for p, value in zip(params, before):
                assert torch.equal(whole(p), value) == bad
        values = whole(params[1])
        assert values.isfinite().all()
        assert values.eq(values[0]).all()


@on_processes(2)
def test_interrupted_process_takes_each_collective_once() -> None:
    """After a KeyboardInterrupt on one process, from the reduction on, all take the same step."""
    mesh = flat_mesh()

    def run(n: int | None) -> tuple[list[Tensor], bool]:
        optimizer = two_groups(mesh, [Shard(0)])
        for _ in range(2):
            optimizer.step()
        with counted_collectives() as counts:
            if n is None or rank():
                optimizer.step()
                raised = False
            else:
                with InterruptAt(n, "polls", within=fusedoptim, since="sums_by_tensor") as at:
                    optimizer.step()
                raised = at.has_raised
        assert counts == [1]
        optimizer.step()
        return [p.detach().clone() for g in optimizer.param_groups for p in g["params"]], raised

    expected, _ = run(None)
    for n in itertools.count():
        values, raised = run(n)
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(values, expected)), n
        going_on = torch.tensor(float(raised))
        distributed.broadcast(going_on, 0)
        if not going_on:
            assert n > 20
            break


@on_processes(2)
def test_norms_of_fsdp1_are_refused() -> None:
    model = fsdp1(new_model())
    loss_of(model, next(own_batches())).backward()
    for optimizer in (
        make(LAMB, model),
        ADAMW.make(model.parameters(), lr=0.1, max_grad_norm=1.0),
    ):
        with pytest.raises(RuntimeError, match="fully_shard"):
            optimizer.step()


@on_processes(1)
def test_norms_of_fsdp1_in_one_process() -> None:
    """Norms are right in one process, as no other one has a part of the parameters."""
    for case in (LAMB, ADAMW):
        model = fsdp1(new_model())
        train(model, case.make(model.parameters(), **case.kwargs[-1], max_grad_norm=0.1))
        assert_trained(model, case, limit=0.1)


@on_processes(2)
def test_infinities_of_fsdp1_skip_the_step_of_all() -> None:
    """ShardedGradScaler tells all processes of them."""
    for case, host in itertools.product((ADAMW, ADAGRAD), (False, True)):
        model = fsdp1(new_model())
        scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
        if host:
            optimizer: Any = OffloadOptimizer(model.parameters(), case.cls, **case.kwargs[-1])
        else:
            optimizer = make(case, model)
        for is_infinite in (False, True, False):
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(loss_of(model, next(own_batches()))).backward()
            if is_infinite and rank() == 0:
                next(p for p in model.parameters() if p.numel()).grad.view(-1)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            own = [p for p in model.parameters() if p.numel()]
            is_same = all(map(torch.equal, before, model.parameters()))
            assert is_same == (is_infinite or not own), (rank(), is_infinite)
        assert scaler.get_scale() == 2.0
