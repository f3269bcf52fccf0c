"""The trainers that people use, as examples/trainers has them, in two processes with gloo.

Each training runs once to its end, and once more from a checkpoint of its middle, in new processes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.running import ROOT

TRAININGS = {
    "transformers": ("with_transformers.py", "checkpoint-20"),
    "accelerate": ("with_accelerate.py", "checkpoint-2"),
    "accelerate --fsdp": ("with_accelerate.py", "checkpoint-2"),
    "lightning": ("with_lightning.py", "epoch=1.ckpt"),
    "lightning --fsdp": ("with_lightning.py", "epoch=1.ckpt"),
}
"""The script of each, and the checkpoint of its middle."""

LAUNCH = """
import json, os, runpy, sys, traceback
import accelerate, lightning, sklearn.datasets, transformers.trainer
from accelerate.state import AcceleratorState, DistributedType

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

What they import, which takes longer than all their trainings, is imported once.
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all trainings leave."""
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
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return folder


def losses(folder: Path) -> tuple[float, float]:
    """The first and the last of a training, which names its optimizer beside them."""
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
