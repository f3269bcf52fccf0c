"""Every test begins with the memory format left to level and device, and runs in one thread."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transforms.passes.channels_last._default", None)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Models are small: torch's threads would mostly wait for one another."""
