"""What torchrun starts for test_elastic.py: training runs in which a process is killed.

The argument is a folder, which gets a folder for each training run. SplitSGD's run surrounds
FusedAdamW's, so that one restart meets both.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusedoptim import FusedAdamW
from tests.running import ROOT

KILLED_AT = 6
"""A step in the fourth epoch of FusedAdamW's training run."""
EXAMPLE = ROOT / "examples" / "trainers" / "with_torchrun.py"


KILLED = "killed"
"""A file that the process makes right before it is killed."""


def die_once(folder: Path, optimizer: Any, args: Any, kwargs: Any) -> None:
    if not isinstance(optimizer, FusedAdamW) or distributed.get_rank() == 0:
        return
    done = next((int(state["step"]) for state in optimizer.state.values()), 0)
    if done == KILLED_AT and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        (folder / KILLED).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def random_digits() -> Any:
    """Random data in the form of sklearn's digits, as sklearn takes long to import."""
    return types.SimpleNamespace(data=torch.rand(256, 64) * 16, target=torch.arange(256) % 10)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    datasets: Any = types.ModuleType("sklearn.datasets")
    datasets.load_digits = random_digits
    sys.modules["sklearn.datasets"] = datasets
    spec = importlib.util.spec_from_file_location("with_torchrun", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    distributed.init_process_group("gloo")
    register_optimizer_step_pre_hook(functools.partial(die_once, folder))
    example.EPOCHS, epochs = 2, example.EPOCHS
    example.train(folder / "SplitSGD", split=True)
    example.EPOCHS = epochs
    example.train(folder / "FusedAdamW", split=False)
    example.train(folder / "SplitSGD", split=True)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        example.train(folder / "FusedAdamW, uninterrupted", split=False)
        example.train(folder / "SplitSGD, uninterrupted", split=True)
    gc.collect()  # DDP must be gone before its process group
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
