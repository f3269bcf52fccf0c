"""Every test begins with the memory format left to level and device."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _automatic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transforms.passes.channels_last._default", None)
