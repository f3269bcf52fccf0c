from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from allocator import Pool
from tests.allocator.helpers import FaultyDriver


@pytest.fixture
def driver() -> FaultyDriver:
    return FaultyDriver()


@pytest.fixture
def pool(driver: FaultyDriver) -> Pool:
    return Pool(driver=driver, name="mine")


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Those that need not walk all of torch."""
    gc.freeze()
    yield
    gc.unfreeze()
