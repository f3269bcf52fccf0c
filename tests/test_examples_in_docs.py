"""The examples in public docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = (
    *("allocator._queues", "allocator._runtime", "fusedoptim._optimizer", "fusedoptim.sgd"),
    *("transforms._copies", "transforms._fuse_step", "transforms._split_weights"),
)


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0
