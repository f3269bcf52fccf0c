"""Run code in another process, in a fork or in threads."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
"""The first line of a script that runs on one core: the driver obeys the process's affinity."""
LIMIT = 300  # seconds for a script
_OPENMP = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
"""Variables that OpenMP reads when torch loads it."""
_READ_LATER = ("FUSEDOPTIM_", "CL_", "OCL_", "ONEAPI_", "ONEDNN_")
"""How variables begin that nothing reads when torch is imported.

Only this package and the drivers read them, which torch does not load, and oneDNN when it is first
used.
"""
_PYTHON = (
    *(sys.executable, "-W", "ignore:This process:DeprecationWarning"),
    *("-W", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"),
)
"""The interpreter of scripts, without the warnings that pytest ignores: see ``pyproject.toml``."""
UNBUFFERED = """
import ctypes
libc = ctypes.CDLL(None)
libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 2, 0)
"""
"""The first lines of a script that writes C's standard output at once, as kernels' printf needs it.

Python does so by itself if PYTHONUNBUFFERED is set, which it only reads in a new interpreter.
"""


def run_script(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in another process, with these environment variables.

    The process is a fork of one that has imported torch, unless some variables matter before that.
    """
    names = (name for name in variables if name not in _OPENMP)
    if all(name.startswith(_READ_LATER) for name in names):
        forks = _Forks.with_openmp(*map({**os.environ, **variables}.get, _OPENMP))
        return forks.run(textwrap.dedent(script), arguments, variables)
    return run_fresh(script, *arguments, **variables)


def run_fresh(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a new interpreter, with these environment variables."""
    return subprocess.run(
        [*_PYTHON, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **variables},
        timeout=LIMIT,
    )


def check_script(script: str, *arguments: str, **variables: str) -> str:
    """Run a script that must succeed and report no error; return what it prints."""
    return _checked(run_script(script, *arguments, **{"OMP_NUM_THREADS": "1", **variables}))


def check_fresh(script: str, *arguments: str, **variables: str) -> str:
    """Do the same as :func:`check_script` in a new interpreter."""
    return _checked(run_fresh(script, *arguments, **{"OMP_NUM_THREADS": "1", **variables}))


def _checked(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stderr) == (0, ""), f"{done.returncode}\n{done.stderr}"
    return done.stdout


class _Forks:
    """A process whose forks run scripts, one at a time: ``tests/forking.py``."""

    @staticmethod
    @functools.cache
    def with_openmp(*values: str | None) -> _Forks:
        """The process with these values of the variables that OpenMP reads."""
        return _Forks({name: value for name, value in zip(_OPENMP, values) if value is not None})

    def __init__(self, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [*_PYTHON, "-c", "from tests.forking import next_script; exec(next_script())"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        atexit.register(self._end)

    def run(
        self, script: str, arguments: Sequence[str], variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        requests, results = self._process.stdin, self._process.stdout
        assert requests is not None
        assert results is not None
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            request = {
                "script": script,
                "arguments": arguments,
                "variables": {**os.environ, **variables},
                "files": [os.devnull, *map(str, files)],
            }
            print(json.dumps(request), file=requests, flush=True)
            if not select.select([results], [], [], LIMIT)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(script, LIMIT)
            status = int(results.readline())
            stdout, stderr = (file.read_text() for file in files)
        return subprocess.CompletedProcess(script, status, stdout, without_greeting(stderr))

    def _end(self) -> None:
        self._process.communicate()


def without_greeting(errors: str) -> str:
    """Remove the warning of release 2024.2's CPU driver from what a process wrote on stderr.

    The driver warns of each processor newer than itself.
    """
    return errors.replace("SYCL CPU RT Warning: Unknown host CPU.\n", "")


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
    """Return a call's results with 1, 2 and 5 of torch's threads, which kernels run on, too."""
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
