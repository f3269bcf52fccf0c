"""Processes are killed in the middle of a step and of a save, and started again."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.fusedoptim.distributed import restarted
from tests.fusedoptim.distributed.processes import finish, start


def run(folder: Path, attempt: int) -> list[int | None]:
    """Start two processes, and return their exit codes."""
    store = folder / f"store {attempt}"
    processes = [start(restarted.main, folder, store, rank) for rank in range(2)]
    return [finish(process, 100) for process in processes]


def test_weights_are_those_of_an_uninterrupted_training(tmp_path: Path) -> None:
    for attempt in range(2):  # one process is killed, and the other fails
        survivor, killed = run(tmp_path, attempt)
        assert survivor != 0
        assert killed == -signal.SIGKILL
    assert "must call step" in (tmp_path / "refused").read_text()  # by the first attempt's survivor
    assert run(tmp_path, 2) == [0, 0]
    for rank in range(2):  # the save of step 3 was interrupted
        assert (tmp_path / f"equal {rank}").read_text() == "resumed from step 3"
