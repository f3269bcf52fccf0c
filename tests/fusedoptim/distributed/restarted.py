"""A training run that test_restart.py starts several times: it is killed, and resumes."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from fusedoptim import FusedAdamW
from fusedoptim.step.sharding import local_of
from tests.fusedoptim.helpers import bits, params_of

STEPS = 5
FOLDER: Path


def die_once(where: str) -> None:
    """Kill the second process, unless it was already killed in ``where``."""
    mark = FOLDER / f"killed in {where}"
    if distributed.get_rank() == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def step_while_the_other_dies(optimizers: Sequence[Any]) -> None:
    """Take a step; the first time, the second process is killed before it takes part.

    The first process's step then raises, and writes neither weights nor state.
    """
    ready = FOLDER / "ready"
    if distributed.get_rank() == 1:
        while not ready.exists():  # until the other has received what backward sends
            time.sleep(0.01)
        die_once("a step")
        step(optimizers)
        return
    ready.touch()
    before = [value.clone() for value in own_values(optimizers)]
    try:
        step(optimizers)
    except RuntimeError as error:
        if all(map(torch.equal, own_values(optimizers), before)):
            (FOLDER / "refused").write_text(str(error))
        raise


def step(optimizers: Sequence[Any]) -> None:
    for optimizer in optimizers:
        optimizer.step()


def own_values(optimizers: Sequence[Any]) -> list[Tensor]:
    """This process's parts of the weights and state."""
    state = [
        value for each in optimizers for state in each.state.values() for value in state.values()
    ]
    params = [p.detach() for each in optimizers for p in params_of(each)]
    return list(map(bits, map(local_of, [*params, *state])))


class DyingWriter(FileSystemWriter):
    """A writer that kills the second process after its part, before the checkpoint is complete."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        done = super().write_data(*args, **kwargs)
        done.wait()
        die_once("a save")
        return done


def new_training() -> tuple[nn.Module, list[Any]]:
    """A model, and two optimizers, whose states have 32 and 8 bits, of its layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).bfloat16()
    fully_shard(model)
    make = functools.partial(FusedAdamW, lr=0.05, split=True, max_grad_norm=1.0)
    return model, [
        make(model[0].parameters()),
        make(model[2].parameters(), state_dtype="float8"),
    ]


def train(
    model: nn.Module,
    optimizers: Sequence[Any],
    first: int,
    after: Callable[[int], None] | None = None,
) -> None:
    """Take the steps from ``first`` on, and call ``after`` with the number of each."""
    for number in range(first, STEPS):
        generator = torch.Generator().manual_seed(10 * number + distributed.get_rank())
        batch = torch.randn(4, 6, generator=generator).bfloat16()
        model.zero_grad()
        model(batch).float().square().mean().backward()
        if after is not None and number == 2:
            step_while_the_other_dies(optimizers)
        else:
            step(optimizers)
        if after is not None:
            after(number)


def values(model: nn.Module, optimizers: Sequence[Any]) -> list[Tensor]:
    whole = [p.full_tensor() for p in model.parameters()]  # type: ignore[operator]
    return whole + [p.full_tensor() for each in optimizers for p in each.master_params()]


def resume_and_compare() -> None:
    latest = FOLDER / "latest"
    model, optimizers = new_training()
    first = 0
    if latest.exists():
        weights, state = get_state_dict(model, optimizers)
        states = {"model": weights, "optimizer": state}
        checkpoint.load(states, checkpoint_id=FOLDER / latest.read_text())
        set_state_dict(model, optimizers, model_state_dict=weights, optim_state_dict=state)
        first = int(latest.read_text()) + 1

    def save(number: int) -> None:
        weights, state = get_state_dict(model, optimizers)
        writer = DyingWriter if number == 3 else FileSystemWriter
        states = {"model": weights, "optimizer": state}
        checkpoint.save(states, storage_writer=writer(FOLDER / str(number), overwrite=True))
        if distributed.get_rank() == 0:
            new = FOLDER / "new"
            new.write_text(str(number))
            new.replace(latest)  # so the latest one is always complete

    train(model, optimizers, first, save)
    other, uninterrupted = new_training()
    train(other, uninterrupted, 0)
    assert all(map(torch.equal, values(model, optimizers), values(other, uninterrupted)))
    (FOLDER / f"equal {distributed.get_rank()}").write_text(f"resumed from step {first}")


def main(folder: Path, store: Path, rank: int) -> None:
    """Run one of two processes, which meet at ``store``; ``folder`` has the checkpoints."""
    global FOLDER
    FOLDER = folder
    with open(os.devnull, "w") as nowhere:  # discards what the survivor prints about the other
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    resume_and_compare()
    gc.collect()  # frees what holds the group, whose threads may make torch abort at exit
    distributed.destroy_process_group()
