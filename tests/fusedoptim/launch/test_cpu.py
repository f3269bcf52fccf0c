"""What the launcher knows of the CPU."""

from __future__ import annotations

import pytest

from fusedoptim.kernels.rounding import BLOCK
from fusedoptim.launch.backend import Backend
from fusedoptim.launch.devices import BACKENDS


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
def test_rows_are_whole_blocks(backend: Backend) -> None:
    """Otherwise, kernels would look elsewhere for the scales of 8-bit state."""
    assert backend.shape.chunk % (backend.shape.lanes * BLOCK) == 0
