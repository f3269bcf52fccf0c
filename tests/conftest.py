"""Random inputs are new in every run; the seed is in the header, to run the same again."""

from __future__ import annotations

import gc
import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

SEED = int(os.environ.get("FUSEDOPTIM_TEST_SEED", secrets.randbelow(2**31)))


def pytest_report_header() -> str:
    return f"random inputs: FUSEDOPTIM_TEST_SEED={SEED}"


def pytest_collection_finish() -> None:
    """Take what is imported out of the garbage collector's sight.

    Many tests collect, and the 400,000 objects of torch and the tests took 0.3 s each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels are compiled anew in each run, and nothing of them stays on the disk."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(SEED ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch's own operations run in one thread, so that their sums are the same in each run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
