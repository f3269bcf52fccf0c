"""Tests that run in several processes at once, with a process group of gloo.

Processes start slowly: all tests of a module that need the same number of them run in one group,
one after the other, and each is then reported for itself.
"""

from __future__ import annotations

import datetime
import functools
import gc
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import SEED

TIMEOUT = datetime.timedelta(seconds=60)
"""The timeout of a collective for which a process is missing."""
_LIMIT = 300.0  # seconds for all tests of a module
_PRELOADED = [
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "tests.fusedoptim.helpers",
    "tests.frozen",
]

_tests: dict[tuple[str, int], list[str]] = {}


def on_processes(*counts: int) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Run a test once for each of ``counts``, in that many processes, each of which calls it.

    The test may ask for its rank and size.
    """

    def decorate(function: Callable[[], None]) -> Callable[..., None]:
        for count in counts:
            _tests.setdefault((function.__module__, count), []).append(function.__name__)

        @pytest.mark.parametrize("processes", counts)
        def test(processes: int) -> None:
            reports = _reports(function.__module__, processes)
            errors = reports.get(function.__name__, [])
            assert len(errors) == processes, (
                f"{len(errors)} of {processes} processes ran it; "
                f"those that failed before: {[name for name, e in reports.items() if any(e)]}"
            )
            assert not any(errors), "\n".join(filter(None, errors))

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        test.here = function  # type: ignore[attr-defined]
        return test

    return decorate


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a process that calls a function; modules that take long to import are preloaded."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_call, args=(dict(os.environ), target, arguments))
    process.start()
    return process


def finish(process: Any, limit: float = _LIMIT) -> int | None:
    """Wait for a process to end, kill it after ``limit`` seconds, and return its exit code."""
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
    code: int | None = process.exitcode
    return code


def _call(
    environment: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(environment)  # the fork server may have started in another environment
    target(*arguments)


@functools.cache
def _reports(module: str, count: int) -> dict[str, list[str]]:
    """For each test, what each process reports: an error, or "" for success."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for process in [start(_run, rank, module, count, folder, SEED) for rank in range(count)]:
            finish(process)
        reports: dict[str, list[str]] = {}
        for rank in range(count):
            for line in (folder / str(rank)).read_text().splitlines():
                test, error = json.loads(line)
                reports.setdefault(test, []).append(error)
    return reports


def _run(rank: int, module: str, count: int, folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch.*")
    tempfile.tempdir = str(folder)  # which is removed with what tests leave there
    report = (folder / str(rank)).open("w", buffering=1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=count,
        timeout=TIMEOUT,
    )
    found = importlib.import_module(module)
    status = 0
    for name in _tests[module, count]:
        torch.manual_seed(seed)
        error = ""
        try:
            getattr(found, name).here()
        except BaseException:
            error = f"rank {rank} of {count}:\n{traceback.format_exc()}"
            status = 1
        report.write(json.dumps([name, error]) + "\n")
        if error:  # the others wait for collectives that this process leaves out
            break
    sys.stdout.flush()
    if not status:
        gc.collect()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    os._exit(status)  # torch may abort at exit: pytorch issue 190489
