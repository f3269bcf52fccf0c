from __future__ import annotations

import gc

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
def quick_collections() -> None:
    """Collections that need not visit what other tests imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Threads of torch that wait for work would only take processors from the tests."""
