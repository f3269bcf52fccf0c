"""Helpers of tests around Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def freeze() -> None:
    """Exclude all current objects from collections, which would visit all of torch."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
