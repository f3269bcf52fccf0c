"""Launches of operators' kernels: reuse of what describes their rows, limits, interrupts."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusedoptim
from fusedoptim.launch.block import LaunchBlock
from fusedoptim.ops import _launching, cross_entropy, dropout
from tests.interrupts import InterruptAt


def drop(n: int = 70_000) -> Tensor:
    return dropout(torch.ones(n), torch.tensor(3), 0.5)


def losses(n: int = 70) -> Tensor:
    logits = torch.linspace(0, 1, 5 * n).view(5, n)
    return cross_entropy(logits, torch.arange(5))[0]


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_idle", "_idle_blocks"):
        monkeypatch.setattr(_launching, name, {})


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LaunchBlock]:
    """The launch blocks that a test makes, with none before."""
    forget(monkeypatch)
    found: list[LaunchBlock] = []
    init = LaunchBlock.__init__

    def noting(self: LaunchBlock, *args: object) -> None:
        found.append(self)
        init(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(LaunchBlock, "__init__", noting)
    return found


@pytest.mark.parametrize("call", [drop, losses])
def test_second_call_of_a_size_makes_nothing(
    call: Callable[[], Tensor], made: list[LaunchBlock]
) -> None:
    first = call()
    assert len(made) == 1
    assert torch.equal(call(), first)
    assert len(made) == 1


@pytest.mark.parametrize("call", [drop, losses])
def test_many_sizes_are_forgotten(call: Callable[..., Tensor], made: list[LaunchBlock]) -> None:
    for n in range(5, 10 + _launching._MOST_IDLE):
        call(n)
    for idle in (_launching._idle, _launching._idle_blocks):
        assert len(idle) <= _launching._MOST_IDLE


def test_large_tables_are_forgotten(
    made: list[LaunchBlock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept tables have a limit in bytes, which one table may pass alone: it is not kept."""

    def row_losses(rows: int) -> Tensor:
        return cross_entropy(torch.ones(rows, 2), torch.zeros(rows, dtype=torch.long))[0]

    row_losses(1 << 15)
    most = 5 * made[0].nbytes // 2
    monkeypatch.setattr(_launching, "_MOST_BYTES", most)
    counts = []
    for i in range(1, 6):
        row_losses((1 << 15) + i)
        kept = [block.nbytes for blocks in _launching._idle_blocks.values() for block in blocks]
        assert sum(kept) <= most
        counts.append(len(kept))
    assert counts == [2, 1, 2, 1, 2]
    row_losses(3 << 15)
    assert len([block for blocks in _launching._idle_blocks.values() for block in blocks]) == 2


@pytest.mark.parametrize("call", [drop, losses])
@pytest.mark.parametrize("is_new", [False, True])
def test_interrupted_anywhere(
    call: Callable[[], Tensor], is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call gives the right result. The kernel has ended, as its memory may be freed."""
    expected = call()
    name = "launch" if call is drop else "launch_rows"
    interrupts = 0
    for n in itertools.count():
        if is_new:
            forget(monkeypatch)
        with InterruptAt(n, "polls", within=fusedoptim, since=name) as interrupt:
            assert torch.equal(call(), expected)
        assert torch.equal(call(), expected)
        if not interrupt.has_raised:
            break
        interrupts += 1
    assert interrupts > 5
