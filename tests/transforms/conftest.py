"""Tests begin with one thread and without a set memory format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusedoptim.optimizer import FusedOptimizer


@pytest.fixture(autouse=True)
def _automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transforms.passes.channels_last._default", None)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Models are small: torch's threads would mostly wait for one another."""


@pytest.fixture
def gradients_off() -> Iterator[None]:
    """Run a test as inference runs."""
    with torch.no_grad():
        yield


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with each of our steps."""
    seen: list[int] = []
    update = FusedOptimizer._update
    monkeypatch.setattr(FusedOptimizer, "_update", lambda self: (seen.append(1), update(self))[1])
    return seen
