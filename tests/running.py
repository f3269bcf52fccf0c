"""Code that runs elsewhere: in another process, a forked one, or threads."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
"""Begins a script that runs on one core: the driver obeys the process's affinity."""


def run_script(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another process, with these environment variables."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        timeout=300,
    )


def check_script(script: str, *arguments: str, **variables: str) -> str:
    """Run a script that must succeed and report no error; return what it prints."""
    done = run_script(script, *arguments, **{"OMP_NUM_THREADS": "1", **variables})
    assert (done.returncode, done.stderr) == (0, ""), f"{done.returncode}\n{done.stderr}"
    return done.stdout


def in_fork(call: Callable[[], object]) -> None:
    """Assert that a call succeeds in a forked process, which ends right after it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def at_each_thread_count(call: Callable[[], Any]) -> list[Any]:
    """What a call returns when torch may use 1, 2 and 5 threads, which kernels run on, too."""
    before = torch.get_num_threads()
    returned = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            returned.append(call())
    finally:
        torch.set_num_threads(before)
    return returned


def in_threads(function: Callable[..., Any], *arguments: Any, count: int = 0) -> None:
    """Call a function in a thread for each argument, or in ``count`` threads without any.

    The first error is raised once all threads have ended.
    """
    errors: list[BaseException] = []

    def call(*own: Any) -> None:
        try:
            function(*own)
        except BaseException as error:
            errors.append(error)

    calls = [(argument,) for argument in arguments] + [()] * count
    threads = [threading.Thread(target=call, args=own) for own in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
