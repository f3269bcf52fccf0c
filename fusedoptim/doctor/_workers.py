"""The processes that examine the devices.

A driver may crash its process, and it reads its settings and looks for devices only once in a
process. So each examination starts new processes. Several of them divide the kernels among
themselves, because in one process a driver compiles one kernel at a time. One of them imports torch
first.
"""

from __future__ import annotations

import array
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

_MOST_WORKERS = 4
_MOST_KERNELS = 4096
_SECONDS = 120  # after which a worker counts as hung


class Outcome(NamedTuple):
    """One worker's report, and how it ended."""

    said: list[dict[str, Any]]
    """Its lines."""
    end: str
    """How it failed, "" if it did not."""

    @property
    def at(self) -> str:
        """The last action that it announced."""
        at = [line["at"] for line in self.said if "at" in line]
        return at[-1] if at else "examines the devices"

    @property
    def loaded(self) -> list[str]:
        """The libraries that it had loaded at its end; none if it failed."""
        return [path for line in self.said if "loaded" in line for path in line["loaded"]]


class Workers:
    """Processes that examine one device, or all; they start when this is made."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._started = time.monotonic()
        count = min(max(len(os.sched_getaffinity(0)), 2), _MOST_WORKERS)
        self._claims, write_end = os.pipe()
        os.write(write_end, array.array("H", range(_MOST_KERNELS)).tobytes())
        os.close(write_end)
        self._processes = [self._start(with_torch=i == 0) for i in range(count)]

    def _start(self, *, with_torch: bool) -> subprocess.Popen[str]:
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python uses no others
        script = (
            "import gc, sys\n"
            "gc.disable()\n"  # importing torch is faster so
            f"sys.path[:] = {path!r}\n"  # it must find what this process finds
            "from fusedoptim.doctor._worker import main\n"
            f"main({self._device!r}, {self._claims}, {with_torch})"
        )
        return subprocess.Popen(
            [sys.executable, "-c", script],
            pass_fds=(self._claims,),
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # numpy's would wait in a busy loop
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()  # if this was interrupted; else it has ended
            process.communicate()
        os.close(self._claims)

    def outcomes(self) -> list[Outcome]:
        """The report of each, when all have ended."""
        outcomes = [_outcome(process, self._started) for process in self._processes]
        while not any(o.loaded for o in outcomes) and _crashed_in_a_kernel(outcomes[-1]):
            self._processes.append(self._start(with_torch=False))  # the other kernels are untested
            outcomes.append(_outcome(self._processes[-1], self._started))
        return outcomes


def _outcome(process: subprocess.Popen[str], started: float) -> Outcome:
    end = ""
    try:
        left = _SECONDS - (time.monotonic() - started)
        output, errors = process.communicate(timeout=max(left, 1))
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        end = f"hung: it did not end within {_SECONDS} s"
    code = process.returncode
    if code and not end:
        last = (errors.strip().splitlines() or ["it printed nothing"])[-1]
        end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended: {last}"
    said = []
    for line in output.splitlines():
        try:
            said.append(json.loads(line))
        except ValueError:  # cut off by a crash
            continue
    return Outcome(said, end)


def _crashed_in_a_kernel(outcome: Outcome) -> bool:
    return (
        bool(outcome.end) and outcome.at.startswith("tests ") and not outcome.end.startswith("hung")
    )
