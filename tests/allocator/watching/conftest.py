from __future__ import annotations

import pytest

from allocator import Pool


@pytest.fixture
def pool() -> Pool:
    return Pool("cpu", name="a <b>\"pool\" & 'more'</b>")
