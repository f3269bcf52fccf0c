"""What is known of a queue without asking it, and what is kept while its kernels run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fusedoptim.launch import order
from fusedoptim.launch.order import InFlight, Progress, in_flight_on, wait_for_host


def test_progress() -> None:
    progress = Progress()
    waits: list[bool] = []
    assert not progress.wait(lambda: waits.append(True))
    assert not waits
    progress.latest = object()
    assert progress.latest is not progress.ended
    assert progress.wait(lambda: waits.append(True))
    assert not progress.wait(lambda: waits.append(True))
    assert progress.latest is progress.ended
    assert len(waits) == 1


def test_what_is_submitted_meanwhile_still_runs() -> None:
    progress = Progress()
    progress.latest = object()

    def submit() -> None:
        progress.latest = object()

    progress.wait(submit)  # another thread submits while this one waits
    assert progress.latest is not progress.ended
    progress.wait(lambda: None)
    assert progress.latest is progress.ended


class Event:
    has_ended = False


class Queue:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[InFlight, InFlight]]:
    """Two queues, and the only ones that are registered."""
    monkeypatch.setattr(order, "on_host", {})
    both = tuple([InFlight(Queue(), is_ordered=True) for _ in range(2)])
    for one in both:
        one._register = order.on_host
    yield both  # type: ignore[misc]
    assert not order.on_host


def waits(queue: InFlight) -> int:
    return int(queue._queue.waits)


def test_queues_of_what_nobody_waits_for(queues: tuple[InFlight, InFlight]) -> None:
    some, other = queues
    some.submit([Event()], "memory")
    other.submit([Event()], "more memory")
    wait_for_host(but_for=some)
    wait_for_host(but_for=some)
    assert (waits(some), waits(other)) == (0, 1)
    assert (list(some.owners.values()), other.owners) == (["memory"], {})
    wait_for_host()
    wait_for_host()
    wait_for_host(but_for=other)
    assert (waits(some), waits(other)) == (1, 1)
    other.submit([Event()], "memory")
    wait_for_host()
    assert (waits(some), waits(other)) == (1, 2)
    assert some.owners == other.owners == {}


def test_a_slow_queue_does_not_hold_up_another(queues: tuple[InFlight, InFlight]) -> None:
    slow, quick = queues
    slow.submit([Event()], "memory")
    events = [Event(), Event(), Event()]
    for i, event in enumerate(events):
        quick.submit([event], i)
    events[0].has_ended = events[2].has_ended = True
    quick.drop_ended()
    assert list(quick.owners.values()) == [1, 2]
    events[1].has_ended = True
    quick.drop_ended()
    assert not quick.owners
    assert slow.owners
    wait_for_host()


def test_what_is_submitted_while_another_waits_is_kept(
    queues: tuple[InFlight, InFlight], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, _ = queues
    queue.submit([Event()], "first")
    with monkeypatch.context() as patch:
        patch.setattr(queue._queue, "wait", lambda: queue.submit([Event()], "second"))
        queue.wait()
    assert list(queue.owners.values()) == ["second"]
    assert list(order.on_host.values()) == [queue]
    queue.wait()


def test_one_object_for_a_queue() -> None:
    queue = Queue()
    assert in_flight_on(queue, is_ordered=True) is in_flight_on(queue, is_ordered=True)
