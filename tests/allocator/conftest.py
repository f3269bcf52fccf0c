from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from allocator import Pool
from tests.allocator.helpers import FaultyDriver, bytes_of_blocks, check


@pytest.fixture
def driver() -> FaultyDriver:
    return FaultyDriver()


@pytest.fixture
def pool(driver: FaultyDriver) -> Iterator[Pool]:
    """A pool that must be empty when the test ends."""
    pool = Pool(driver=driver, name="mine")
    yield pool
    gc.collect()  # raised errors keep their frames alive
    assert pool.memory_allocated() == 0
    pool._core.flush_cache()
    assert bytes_of_blocks(pool) == 0
    assert not pool._core.store.holders
    check(pool, driver)


@pytest.fixture
def _many_switches() -> Iterator[None]:
    """Let Python switch threads a thousand times as often as by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Use one torch thread: idle ones would only take processor time from the tests."""
