"""The examples in public docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "allocator._advice",
    "allocator._budget",
    "allocator._default",
    "allocator._default_statistics",
    "allocator._hooks",
    "allocator._memory",
    "allocator._plan",
    "allocator._pool",
    "allocator._queues",
    "allocator._replay",
    "allocator._reports",
    "allocator._reserve",
    "allocator._runtime",
    "allocator._scopes",
    "allocator._sizes",
    "allocator._statistics",
    "allocator._timeline",
    "allocator._trace",
    "fusedoptim.sgd",
]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
