"""Random inputs differ in every run; pytest's header shows the seed that repeats a run."""

from __future__ import annotations

import os
import secrets
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.garbage import freeze
from tests.running import without_greeting

SEED = int(os.environ.get("FUSEDOPTIM_TEST_SEED", secrets.randbelow(2**31)))


def pytest_report_header() -> str:
    return f"random inputs: FUSEDOPTIM_TEST_SEED={SEED}"


@pytest.fixture(scope="module", autouse=True)
def _frozen_imports() -> None:
    """Exclude all objects of imported modules from garbage collection: many tests collect."""
    freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Each run compiles the kernels again, into a temporary folder."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def _without_the_drivers_greeting() -> Iterator[None]:
    """Remove the driver's greeting from the stderr of child processes."""
    run = subprocess.run

    def run_without_it(*args: Any, **kwargs: Any) -> subprocess.CompletedProcess[Any]:
        done = run(*args, **kwargs)
        if isinstance(done.stderr, str):
            done.stderr = without_greeting(done.stderr)
        return done

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(subprocess, "run", run_without_it)
        yield


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    # Not torch.manual_seed, which formats the stack for each kind of device that is missing.
    torch.default_generator.manual_seed(SEED ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run torch's own operations in one thread, so that their sums are the same in every run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
