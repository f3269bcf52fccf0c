"""The examples in public docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "allocator._queues",
    "allocator._runtime",
    "fusedoptim.sgd",
    "transforms._channels_last",
    "transforms._fold_batch_norm",
    "transforms._optimize",
    "transforms._report",
]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transforms._channels_last._default", None)  # which an example changes
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
