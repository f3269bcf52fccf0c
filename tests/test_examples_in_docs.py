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
    "fusedoptim._optimizer",
    "fusedoptim.sgd",
    "transforms._channels_last",
    "transforms._copies",
    "transforms._fold_batch_norm",
    "transforms._fuse_step",
    "transforms._optimize",
    "transforms._report",
    "transforms._split_weights",
]


@pytest.mark.parametrize("module", MODULES)
def test_docstrings(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if module == "transforms._channels_last":  # whose example changes this
        monkeypatch.setattr("transforms._channels_last._default", None)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # an error's message may be long
    result = doctest.testmod(importlib.import_module(module), optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0
