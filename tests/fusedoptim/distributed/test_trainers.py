"""The trainers that people use, as examples/trainers has them, in two processes with gloo.

Each training runs to its end once without a break, and once from a checkpoint halfway, in new
processes.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter

from tests.fusedoptim.helpers import each_case, params_of, single
from tests.optimizer_cases import OptimizerCase
from tests.running import LIMIT, ROOT

with warnings.catch_warnings():  # from their imports
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from transformers import Trainer, TrainingArguments

TRAININGS = {
    "transformers": ("with_transformers.py", "checkpoint-20"),
    "accelerate": ("with_accelerate.py", "checkpoint-2"),
    "accelerate --fsdp": ("with_accelerate.py", "checkpoint-2"),
    "lightning": ("with_lightning.py", "epoch=1.ckpt"),
    "lightning --fsdp": ("with_lightning.py", "epoch=1.ckpt"),
}
"""The script of each trainer, and the name of the checkpoint halfway."""

LAUNCH = """
import json, os, runpy, sys, traceback
import accelerate, lightning, sklearn.datasets, transformers.trainer
import fusedoptim.adam, torch.distributed.checkpoint, torch.distributed.tensor.parallel
from accelerate.state import AcceleratorState, DistributedType
import tests.frozen

initialize = AcceleratorState.__init__

def shard_on_the_cpu(self, *args, fsdp_plugin=None, **kwargs):
    initialize(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
    if hasattr(self, "fsdp_plugin"):  # each of these objects sets the type again
        self.distributed_type = DistributedType.FSDP

AcceleratorState.__init__ = shard_on_the_cpu  # it shards on GPUs only, though gloo can

def train(rank, port, arguments):
    output = os.open(arguments[2] + f".{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_PORT=str(port))
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

for port, arguments in json.loads(sys.argv[1]):
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            train(rank, port, arguments)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
"""
"""Runs scripts one after the other, each in two processes with the environment that torchrun sets.

Modules that take long to import are imported once, and left out of garbage collection.
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what all training runs leave."""
    folder = tmp_path_factory.mktemp("trainers")
    runs = []
    for name, (script, middle) in TRAININGS.items():
        options = name.split()[1:]
        whole, resumed = folder / name, folder / f"{name} resumed"
        start = [str(ROOT / "examples" / "trainers" / script), "--folder"]
        runs.append((free_port(), [*start, str(whole), *options]))
        resume = ["--resume", str(whole / middle)]
        runs.append((free_port(), [*start, str(resumed), *options, *resume]))
    variables = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "test",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, json.dumps(runs)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        timeout=LIMIT * len(runs),
    )
    assert done.returncode == 0, done.stderr
    return folder


def losses(folder: Path) -> tuple[float, float]:
    """The first and the last loss that a training run prints."""
    outputs = [Path(f"{folder}.{rank}").read_text() for rank in range(2)]
    found = re.findall(r"^FusedAdamW: loss (\S+) to (\S+)$", outputs[0], re.MULTILINE)
    assert len(found) == 1, "\n".join(outputs)
    first, last = map(float, found[0])
    return first, last


@pytest.mark.parametrize("name", TRAININGS)
def test_resumed_training_ends_with_the_same_weights(folder: Path, name: str) -> None:
    whole, resumed = folder / name, folder / f"{name} resumed"
    first, last = losses(whole)
    assert last < 0.7 * first
    assert losses(resumed)[1] == last
    weights, again = (torch.load(each / "weights.pt") for each in (whole, resumed))
    assert weights
    assert weights.keys() == again.keys()
    for key, weight in weights.items():
        assert torch.equal(weight, again[key]), key


@pytest.fixture
def accelerate() -> Iterator[None]:
    """Leave nothing of Accelerate in this process or in its environment."""
    before = dict(os.environ)
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("accelerate")
@each_case
def test_wrapped_by_accelerate(case: OptimizerCase) -> None:
    """Accelerate loads the optimizer's own state, replaces methods, counts steps and pickles."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    fused = {"fused": True} if case.is_torchs else {}
    p, optimizer = single(case, **case.kwargs[-1], **fused)
    other = copy.deepcopy(optimizer)
    (q,) = params_of(other)
    assert p.grad is not None
    q.grad = p.grad.clone()
    wrapped = accelerator.prepare(other)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(other, 1, 0.5))
    plain = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    assert isinstance(wrapped.optimizer, case.cls)
    assert optimizer.defaults.items() <= wrapped.defaults.items()
    for _ in range(3):
        optimizer.step()
        plain.step()
        wrapped.step()
        scheduler.step()
        assert torch.equal(p, q)
    copied = pickle.loads(pickle.dumps(wrapped))
    (r,) = params_of(copied)
    p.grad = torch.ones_like(p)
    r.grad = torch.ones_like(r)
    optimizer.step()
    copied.step()
    assert torch.equal(p, r)


@each_case
def test_parameters_replaced_before_the_first_step(case: OptimizerCase) -> None:
    """Accelerate replaces parameters when it shards; split ones are refused: they lose halves."""
    p, optimizer = single(case)
    other = copy.deepcopy(optimizer)
    q = Parameter(p.detach().clone())
    assert p.grad is not None
    q.grad = p.grad.clone()
    other.param_groups[0]["params"] = [q]
    optimizer.step()
    if case.is_split:
        before = q.detach().clone()
        with pytest.raises(ValueError, match="has lost its lower half"):
            other.step()
        assert torch.equal(q, before)
    else:
        other.step()
        assert torch.equal(p, q)


@each_case
def test_wrapped_by_lightning(case: OptimizerCase) -> None:
    """Lightning makes a class that derives from the optimizer's, and copies no attribute."""
    _, optimizer = single(case)
    wrapped = LightningOptimizer(optimizer)
    assert isinstance(wrapped, case.cls)
    assert wrapped.defaults is optimizer.defaults
    assert wrapped.param_groups is optimizer.param_groups
    optimizer.step()
    assert wrapped.state is optimizer.state
    assert wrapped.state_dict().keys() == optimizer.state_dict().keys()


@pytest.mark.usefixtures("accelerate")
@each_case
def test_made_by_the_trainer_of_transformers(case: OptimizerCase, tmp_path: Path) -> None:
    """The Trainer makes groups with and without weight decay, and passes a class's keywords."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    arguments = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, weight_decay=0.25, report_to="none"
    )
    kwargs = {**case.kwargs[-1], **case.always}
    trainer = Trainer(model=model, args=arguments, optimizer_cls_and_kwargs=(case.cls, kwargs))
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is case.cls
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    assert decays == [0.25, 0.0]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
