"""What was done to a model, what was left alone, and why."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """One module, parameter or optimizer that a pass changed or left alone."""

    where: str
    """its name in the model."""
    what: str
    """what was done to it, or why it was left alone."""
    done: bool = True
    bytes_saved: int = 0
    """fewer bytes that a forward pass or a step reads from memory."""
