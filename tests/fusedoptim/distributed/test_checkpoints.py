"""Checkpoints of sharded optimizers by torch's functions, on other processes and placements."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from fusedoptim import FusedAdam, FusedAdamW, SplitSGD
from tests.fusedoptim.distributed.helpers import all_whole, flat_mesh, rank, size, square_mesh
from tests.fusedoptim.distributed.processes import on_processes
from tests.fusedoptim.helpers import assert_same_bits, random_like
from tests.optimizer_cases import ALL_CASES, TORCHS_CASES, OptimizerCase, configuration_id

Make = Callable[[Any], Any]


def of_table(case: OptimizerCase) -> Make:
    return lambda params: case.make(params, **case.kwargs[-1])


ALL: dict[str, Make] = {
    **{configuration_id(case): of_table(case) for case in ALL_CASES},
    "AdamW, bfloat16": lambda params: FusedAdamW(params, lr=0.1, state_dtype=torch.bfloat16),
    "AdamW, float8": lambda params: FusedAdamW(params, lr=0.1, state_dtype="float8"),
    "Adam, split, float8": lambda params: FusedAdam(
        params, lr=0.1, split=True, state_dtype="float8"
    ),
}
EXACT = {configuration_id(case) for case in ALL_CASES if case.is_elementwise}
"""Names of the cases whose update of an element depends on no other element."""


def new_model(mesh: DeviceMesh | None, name: str) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    if "plit" in name:
        model = model.bfloat16()
    return model if mesh is None else fully_shard(model, mesh=mesh)


def step(model: nn.Module, optimizer: Any, which: int) -> None:
    """Take a step with gradients that depend on ``which`` alone."""
    torch.manual_seed(which)
    for p in model.parameters():
        grad = random_like(torch.empty(p.shape)).to(p.dtype)
        p.grad = grad
        if hasattr(p, "device_mesh"):
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
    optimizer.step()
    optimizer.zero_grad()


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All elements of weights and state, as a checkpoint has them."""
    names = [name for name, _ in model.named_parameters()]
    found = dict(model.named_parameters())
    for i, state in optimizer.state_dict()["state"].items():
        found |= {f"{names[i]} {key}": value for key, value in state.items()}
    for name, exact in zip(names, optimizer.master_params()):
        found[f"{name} exact"] = exact
    return {name: value.clone() for name, value in zip(found, all_whole(list(found.values())))}


def assert_same(some: dict[str, Tensor], others: dict[str, Tensor], what: str) -> None:
    assert some.keys() == others.keys(), what
    for key, value in some.items():
        # torch.optim loads state in the parameter's dtype, and the next step converts it.
        assert torch.equal(value.double(), others[key].double()), (what, key)


def shared_folder() -> str:
    """A new folder, the same one on all processes."""
    names = [tempfile.mkdtemp()]
    distributed.broadcast_object_list(names, 0)
    return names[0]


def states_of(model: nn.Module, optimizer: Any, **options: Any) -> dict[str, Any]:
    chosen = StateDictOptions(**options)
    return {
        "model": get_model_state_dict(model, options=chosen),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=chosen),
    }


def load(model: nn.Module, optimizer: Any, states: dict[str, Any], **options: Any) -> None:
    chosen = StateDictOptions(**options)
    set_model_state_dict(model, states["model"], options=chosen)
    # A copy, as torch.optim loads a tensor of the right dtype without copying it.
    state = copy.deepcopy(states["optimizer"])
    set_optimizer_state_dict(model, optimizer, state, options=chosen)


def check_move(name: str, first: DeviceMesh, then: DeviceMesh) -> None:
    """Save on the processes of one mesh, and load on those of another: both have the first process.

    Weights, state and trails load exactly, and elementwise updates then take the same step.
    """
    make, folder = ALL[name], shared_folder()
    expected: list[Any] = [None, None]
    if first.get_coordinate() is not None:
        model = new_model(first, name)
        optimizer = make(model.parameters())
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        checkpoint.save(
            states_of(model, optimizer), checkpoint_id=folder, process_group=first.get_group()
        )
        saved = everything(model, optimizer)
        step(model, optimizer, 3)
        expected = [saved, everything(model, optimizer)]
    expected = expected if rank() == 0 else [None, None]
    distributed.broadcast_object_list(expected, 0)
    if then.get_coordinate() is not None:
        model = new_model(then, name)
        optimizer = make(model.parameters())
        states = states_of(model, optimizer)
        checkpoint.load(states, checkpoint_id=folder, process_group=then.get_group())
        load(model, optimizer, states)
        assert_same(everything(model, optimizer), expected[0], name)
        if name in EXACT:
            step(model, optimizer, 3)
            assert_same(everything(model, optimizer), expected[1], name)


@on_processes(4)
def test_saved_by_two_processes_and_loaded_by_four() -> None:
    for name in ALL:
        check_move(name, DeviceMesh("cpu", [0, 1]), flat_mesh())


@on_processes(4)
def test_saved_by_four_processes_and_loaded_by_two() -> None:
    for name in ("FusedAdam", "SplitSGD", "FusedLamb(split)", "Adam, split, float8"):
        check_move(name, flat_mesh(), DeviceMesh("cpu", [0, 1]))


def tensor_parallel(mesh: DeviceMesh, name: str) -> nn.Module:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(new_model(None, name), mesh, plan)


@on_processes(4)
def test_saved_in_other_placements() -> None:
    """Checkpoints move both ways between FSDP2 and HSDP, or tensor parallel."""
    rows = functools.partial(new_model, flat_mesh())
    others = [
        functools.partial(new_model, square_mesh()),
        functools.partial(tensor_parallel, flat_mesh()),
    ]
    for name, other in itertools.product(("FusedAdam", "FusedAdam(split)"), others):
        for ways in itertools.permutations((rows, other)):
            folder = shared_folder()
            models = [way(name) for way in ways]
            optimizers = [ALL[name](model.parameters()) for model in models]
            step(models[0], optimizers[0], 1)
            checkpoint.save(states_of(models[0], optimizers[0]), checkpoint_id=folder)
            states = states_of(models[1], optimizers[1])
            checkpoint.load(states, checkpoint_id=folder)
            load(models[1], optimizers[1], states)
            for _ in range(2):
                saved, loaded = map(everything, models, optimizers)
                assert_same(loaded, saved, name)
                for model, optimizer in zip(models, optimizers):
                    step(model, optimizer, 2)


@on_processes(2)
def test_each_kind_of_state_dict() -> None:
    """Sharded, flat and full state dicts load, from each process or from the first alone."""
    kinds: list[dict[str, bool]] = [  # none is both full and flat: torch cannot load its own either
        {},
        {"flatten_optimizer_state_dict": True},
        {"full_state_dict": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    ]
    for (name, make), options in itertools.product(ALL.items(), kinds):
        model = new_model(flat_mesh(), name)
        optimizer = make(model.parameters())
        step(model, optimizer, 1)
        states = states_of(model, optimizer, **{**options, "broadcast_from_rank0": False})
        expected = everything(model, optimizer)
        other = new_model(flat_mesh(), name)
        loaded = make(other.parameters())
        if options.get("broadcast_from_rank0") and rank():
            states = {"model": {}, "optimizer": {}}
        load(other, loaded, states, **options)
        assert_same(everything(other, loaded), expected, f"{name}, {options}")
        for one in (model, other):
            step(one, optimizer if one is model else loaded, 2)
        assert_same(everything(other, loaded), everything(model, optimizer), name)


@on_processes(2)
def test_checkpoints_of_torchs_classes() -> None:
    """torch's checkpoints load into our classes, and ours into torch's."""
    for case in TORCHS_CASES:
        options, makes = case.kwargs[-1], (case.make_reference, case.make)
        model = new_model(flat_mesh(), "")
        for first, then in (makes, makes[::-1]):
            optimizer = first(model.parameters(), **options)
            step(model, optimizer, 1)
            other = new_model(flat_mesh(), "")
            loaded = then(other.parameters(), **options)
            load(other, loaded, states_of(model, optimizer))
            step(model, optimizer, 2)
            step(other, loaded, 2)
            for p, q in zip(model.parameters(), other.parameters()):
                torch.testing.assert_close(p.to_local(), q.to_local())


def _half_split(params: Any) -> FusedAdamW:
    chosen = list(params)
    optimizer = FusedAdamW(chosen, lr=0.1)
    optimizer.split_params(chosen[::2])
    return optimizer


@on_processes(2)
def test_split_parameters_that_are_not_sharded() -> None:
    """Moments are loaded too: the trails do not pass for the whole state of a new optimizer."""
    makes: list[Make] = [
        lambda params: FusedAdamW(params, lr=0.1, split=True),
        lambda params: SplitSGD(params, lr=0.1, momentum=0.9),
        _half_split,
    ]
    for make in makes:
        folder = shared_folder()
        model, other = new_model(None, ""), new_model(None, "")
        optimizer, loaded = make(model.parameters()), make(other.parameters())
        step(model, optimizer, 1)
        checkpoint.save(states_of(model, optimizer), checkpoint_id=folder)
        states = states_of(other, loaded)
        checkpoint.load(states, checkpoint_id=folder)
        load(other, loaded, states)
        assert_same_bits(loaded, optimizer)
        for one, its in ((model, optimizer), (other, loaded)):
            step(one, its, 2)
        assert_same_bits(loaded, optimizer)
        states = get_optimizer_state_dict(
            model, optimizer, options=StateDictOptions(full_state_dict=True)
        )
        third = new_model(None, "")
        fresh = make(third.parameters())
        set_optimizer_state_dict(
            third,
            fresh,
            copy.deepcopy(states) if rank() == 0 else {},
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        )
        for p, q in zip(third.parameters(), model.parameters()):
            for name, value in optimizer.state[q].items():
                assert torch.equal(fresh.state[p][name], value), name


@on_processes(2)
def test_state_dict_before_the_first_step() -> None:
    """A first state_dict has the trails, and loads into an optimizer that has taken steps."""
    model = new_model(flat_mesh(), "split")
    optimizer = FusedAdam(model.parameters(), split=True)
    assert not optimizer.state
    before = optimizer.state_dict()
    assert [list(state) for state in before["state"].values()] == [["trail"]] * 4
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, optimizer, 1)
    optimizer.load_state_dict(before)
    model.load_state_dict(weights)
    other = new_model(flat_mesh(), "split")
    fresh = FusedAdam(other.parameters(), split=True)
    for one, its in ((model, optimizer), (other, fresh)):
        step(one, its, 2)
    assert_same(everything(model, optimizer), everything(other, fresh), "")
    assert size() == 2
