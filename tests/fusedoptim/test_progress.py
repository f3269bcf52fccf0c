"""What is known of a queue without asking it."""

from __future__ import annotations

from fusedoptim.launch.progress import Progress, Unwaited


def test_progress() -> None:
    progress = Progress()
    waits: list[bool] = []
    assert progress.is_idle
    progress.wait(lambda: waits.append(True))
    assert not waits
    progress.submit()
    assert not progress.is_idle
    for _ in range(2):
        progress.wait(lambda: waits.append(True))
    assert progress.is_idle
    assert len(waits) == 1


def test_what_is_submitted_meanwhile_still_runs() -> None:
    progress = Progress()
    progress.submit()
    progress.wait(progress.submit)  # by another thread, while this one waits
    assert not progress.is_idle
    progress.wait(lambda: None)
    assert progress.is_idle


class Queue:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_queues_of_what_nobody_waits_for() -> None:
    unwaited, some, other = Unwaited(), Queue(), Queue()
    unwaited.submit(some)
    unwaited.submit(other)
    unwaited.wait_elsewhere(some)
    unwaited.wait_elsewhere(some)
    assert (some.waits, other.waits) == (0, 1)
    unwaited.wait()
    unwaited.wait()
    unwaited.wait_elsewhere(other)
    assert (some.waits, other.waits) == (1, 1)
    unwaited.submit(other)
    unwaited.wait()
    assert (some.waits, other.waits) == (1, 2)
