"""torchrun restarts the training of examples/trainers/with_torchrun.py when a process is killed."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils import _pytree

from tests.fusedoptim.distributed.elastic import KILLED
from tests.running import run_script

TORCHRUN = """
import os, sys
import torch._dynamo, torch.distributed.run
import tests.fusedoptim.distributed.elastic as training
import tests.frozen

os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
options += ["--run-path", "--start-method", "fork"]
torch.distributed.run.main([*options, training.__file__, sys.argv[1]])
"""
"""torchrun, which forks its processes from one that has imported what they need."""


def test_weights_are_those_of_an_uninterrupted_training(tmp_path: Path) -> None:
    done = run_script(TORCHRUN, str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    # torchrun reports the killed process or the other one, whose collective failed.
    assert (tmp_path / KILLED).exists()
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
