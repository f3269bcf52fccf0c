"""Processes that are missing, hold other parameters, or have lost a part of a checkpoint."""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

from fusedoptim import FusedAdamW, FusedLamb, FusedSGD, SplitSGD
from fusedoptim.step.sharding import local_of
from tests.fusedoptim.distributed.helpers import flat_mesh, rank, square_mesh, whole
from tests.fusedoptim.distributed.processes import on_processes
from tests.fusedoptim.distributed.test_checkpoints import (
    assert_same,
    everything,
    load,
    new_model,
    shared_folder,
    states_of,
    step,
)
from tests.fusedoptim.helpers import bits, params_of

SHORT = datetime.timedelta(seconds=5)


def impatient_mesh() -> DeviceMesh:
    """A mesh whose collectives have a short timeout, once kernels are compiled."""
    for optimizer in (FusedSGD, FusedLamb):
        param = Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        optimizer([param], lr=0.1, max_grad_norm=1.0).step()
    distributed.barrier()
    group = distributed.new_group([0, 1], timeout=SHORT)
    # DTensor takes equal meshes for one, even if their groups differ, so each has its own name.
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))


def new_params(
    mesh: DeviceMesh, *sizes: int, dtype: torch.dtype = torch.float32
) -> list[Parameter]:
    values = [torch.ones(size, dtype=dtype) for size in sizes]
    params = [
        Parameter(distribute_tensor(value, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None))
        for value in values
    ]
    for p in params:
        p.grad = torch.ones_like(p)
    return params


@contextlib.contextmanager
def refused(
    params: list[Parameter], match: str, error: type[Exception] = RuntimeError
) -> Iterator[None]:
    """Assert that a step raises soon, and writes no weight."""
    before = [local_of(p).detach().clone() for p in params]
    start = time.monotonic()
    with pytest.raises(error, match=match):
        yield
    assert time.monotonic() - start < 30
    for p, value in zip(params, before):
        assert torch.equal(local_of(p), value)


def kinds(mesh: DeviceMesh, *sizes: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [
        FusedSGD(new_params(mesh, *sizes, dtype=dtype), max_grad_norm=1.0),
        FusedLamb(new_params(mesh, *sizes, dtype=dtype), lr=0.1),
        FusedLamb(new_params(mesh, *sizes, dtype=dtype), lr=0.1, max_grad_norm=1.0),
    ]


@on_processes(2)
def test_step_on_one_process_only() -> None:
    for kind in range(3):
        mesh = impatient_mesh()
        optimizer = kinds(mesh, 4)[kind]
        if rank() == 0:
            with refused(optimizer.param_groups[0]["params"], "must call step"):
                optimizer.step()
            assert not optimizer.state
        distributed.barrier()


def values_of(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@on_processes(2)
def test_state_where_a_collective_fails() -> None:
    """A step of Lamb that fails changes no weight, moment or count, of whole parameters either."""
    mesh = impatient_mesh()
    params = [*new_params(mesh, 40_000, 5), Parameter(torch.ones(6))]
    params[-1].grad = torch.ones(6)
    optimizer = FusedLamb(params, lr=0.1)
    optimizer.step()
    if rank() == 0:
        before = [bits(local_of(value)) for value in values_of(optimizer)]
        with refused(params, "must call step"):
            optimizer.step()
        for value, expected in zip(values_of(optimizer), before, strict=True):
            assert torch.equal(bits(local_of(value)), expected)
    distributed.barrier()


@on_processes(2)
def test_other_parameters_on_one_process() -> None:
    """A step is refused if their shapes, number or dtype differ."""
    mesh = impatient_mesh()
    # The CRCs of the last two, as tuples in a list, differ by a multiple of 1000.
    for sizes in ([4, 6], [8, 10]), ([4], [4, 5, 6, 7]), ([4], [283]):
        for optimizer in kinds(mesh, *sizes[rank()]):
            with refused(params_of(optimizer), "same parameters"):
                optimizer.step()
            assert not optimizer.state
    for other in torch.float64, torch.bfloat16:
        for optimizer in kinds(mesh, 4, dtype=(torch.float32, other)[rank()]):
            with refused(params_of(optimizer), "same parameters"):
                optimizer.step()


@on_processes(2)
def test_parameters_added_on_one_process() -> None:
    """After steps of equal parameters, steps are refused until the other process adds them too."""
    mesh = impatient_mesh()
    for optimizer in kinds(mesh, 4):
        optimizer.step()
        before = [bits(local_of(value)) for value in values_of(optimizer)]
        params = [*params_of(optimizer), *new_params(mesh, 6, 8)]
        if rank() == 0:
            optimizer.add_param_group({"params": params[1:]})
        for _ in range(2):
            with refused(params, "same parameters"):
                optimizer.step()
            for value, expected in zip(values_of(optimizer), before, strict=True):
                assert torch.equal(bits(local_of(value)), expected)
        if rank() == 1:
            optimizer.add_param_group({"params": params[1:]})
        for _ in range(2):
            optimizer.step()
        assert all(whole(p).eq(whole(p)[0]).all() and whole(p)[0] < 1 for p in params)


@on_processes(2)
def test_checkpoint_without_a_shard() -> None:
    model = new_model(flat_mesh(), "")
    optimizer = FusedAdamW(model.parameters())
    step(model, optimizer, 1)
    folder = shared_folder()
    checkpoint.save(states_of(model, optimizer), checkpoint_id=folder)
    distributed.barrier()
    if rank() == 0:
        os.remove(min(Path(folder).glob("__1_*.distcp")))
    distributed.barrier()
    other = new_model(flat_mesh(), "")
    loaded = FusedAdamW(other.parameters())
    states = states_of(other, loaded)  # which makes the state
    before = everything(other, loaded)
    with pytest.raises(checkpoint.api.CheckpointException):  # with what docs/distributed.md advises
        checkpoint.load(copy.deepcopy(states), checkpoint_id=folder)
    for name, value in everything(other, loaded).items():
        assert torch.equal(value, before[name]), name


@on_processes(2)
def test_state_of_another_mesh() -> None:
    """A load of state that is placed otherwise changes nothing; a full state_dict moves it."""
    makes: dict[str, Callable[[Any], Any]] = {
        "AdamW": FusedAdamW,
        "momentum": functools.partial(FusedSGD, lr=0.1, momentum=0.9),
        "split": functools.partial(SplitSGD, lr=0.1),
    }
    ways = itertools.permutations((flat_mesh(), square_mesh(), None), 2)
    for (name, make), meshes in itertools.product(makes.items(), ways):
        models = [new_model(mesh, name) for mesh in meshes]
        optimizers = [make(model.parameters()) for model in models]
        for i, (model, optimizer) in enumerate(zip(models, optimizers)):
            step(model, optimizer, i)
        before = everything(models[1], optimizers[1])
        with pytest.raises(ValueError, match=r"on a mesh of shape .*full_state_dict=True"):
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        assert_same(everything(models[1], optimizers[1]), before, name)
        whole_states = states_of(models[0], optimizers[0], full_state_dict=True)
        load(models[1], optimizers[1], whole_states, full_state_dict=True)
        for i in range(2, 4):
            assert_same(*map(everything, models, optimizers), name)
            for model, optimizer in zip(models, optimizers):
                step(model, optimizer, i)


@on_processes(2)
def test_group_destroyed_before_the_optimizer() -> None:
    """Steps that need no norm still work. This has to be the module's last test."""
    mesh = flat_mesh()
    optimizers = [*kinds(mesh, 4), FusedAdamW(new_params(mesh, 4))]
    for optimizer in optimizers:
        optimizer.step()
    distributed.barrier()
    distributed.destroy_process_group()
    optimizers.pop().step()
    for optimizer in optimizers:
        with refused(optimizer.param_groups[0]["params"], "destroy_process_group"):
            optimizer.step()
