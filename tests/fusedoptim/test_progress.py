"""What is known of a queue without asking it."""

from __future__ import annotations

from fusedoptim._progress import Progress


def test_progress() -> None:
    progress = Progress()
    assert progress.is_idle
    progress.submit()
    assert not progress.is_idle
    progress.end(progress.latest)
    assert progress.is_idle


def test_what_is_submitted_meanwhile_still_runs() -> None:
    progress = Progress()
    progress.submit()
    latest = progress.latest
    progress.submit()  # by another thread, while this one waits
    progress.end(latest)
    assert not progress.is_idle
    progress.end(progress.latest)
    assert progress.is_idle
