"""How far ahead the kernels of embedding bags prefetch rows, and how much at a time."""

from __future__ import annotations

from typing import Any

from fusedoptim.kernels.language import fetch

__all__ = ["AHEAD", "fetch_columns"]

AHEAD = 32
"""The number of indices, or keys, between the one being added and the one whose row is
prefetched."""


def fetch_columns(values: Any, place: int, each: int) -> None:
    """Prefetch four columns of each of a CPU's lanes, or one."""
    if each == 4:
        fetch(values, place, 64)
    else:
        fetch(values, place, 16)
