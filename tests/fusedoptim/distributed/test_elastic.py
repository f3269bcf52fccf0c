"""torchrun restarts the training of examples/trainers/with_torchrun.py when a process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils import _pytree

from tests.running import ROOT


def test_weights_are_those_of_an_uninterrupted_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "--module"]
    command += ["tests.fusedoptim.distributed.elastic", str(tmp_path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    for name, first in (("FusedAdamW", 3), ("SplitSGD", 2)):
        assert f"{name}: from epoch {first}" in done.stdout
        resumed, whole = (
            _pytree.tree_flatten(torch.load(tmp_path / folder / "latest.pt"))
            for folder in (name, f"{name}, uninterrupted")
        )
        assert resumed[1] == whole[1]
        assert len(resumed[0]) > 20
        for value, other in zip(resumed[0], whole[0]):
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other)
            else:
                assert value == other
