"""How far ahead the kernels of embedding bags prefetch rows, and how much at a time."""

from __future__ import annotations

from typing import Any

from fusedoptim.kernels.language import fetch

__all__ = ["AHEAD", "fetch_columns"]

AHEAD = 32
"""Indices, or keys, between one that is added and one whose rows are fetched."""


def fetch_columns(values: Any, place: int, each: int) -> None:
    """Fetch four columns of each of a CPU's lanes, or one."""
    if each == 4:
        fetch(values, place, 64)
    else:
        fetch(values, place, 16)
