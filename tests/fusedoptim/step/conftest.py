"""Fixtures that tests of steps share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def checked_invariants() -> Iterator[None]:
    """Torch checks each sparse tensor that is made."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield
