"""Processes are killed in the middle of a step and of a save, and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.running import ROOT


def run(folder: Path, attempt: int) -> list[int]:
    """Start two processes; return how they ended."""
    command = [sys.executable, "-m", "tests.fusedoptim.distributed.restarted", str(folder)]
    command.append(str(folder / f"store {attempt}"))
    processes = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    return [process.wait(100) for process in processes]


def test_weights_are_those_of_an_uninterrupted_training(tmp_path: Path) -> None:
    for attempt in range(2):  # one is killed, and the other learns of it
        survivor, killed = run(tmp_path, attempt)
        assert survivor != 0
        assert killed == -signal.SIGKILL
    assert "must call step" in (tmp_path / "refused").read_text()  # of the survivor of the first
    assert run(tmp_path, 2) == [0, 0]
    for rank in range(2):  # the save that was interrupted is that of step 3
        assert (tmp_path / f"equal {rank}").read_text() == "resumed from step 3"
