"""The processes that examine the devices.

A driver may crash its process, and it reads its settings and looks for devices only once in a
process. So each examination starts new processes. Several of them divide the kernels among
themselves, because in one process a driver compiles one kernel at a time. One of them imports torch
first.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

_MOST_WORKERS = 4
_MOST_KERNELS = 4096
_SECONDS = 120  # without a new action, after which a worker counts as hung


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


class _Worker:
    """A process, and what it has said."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process
        self.output, self.errors = bytearray(), bytearray()
        assert process.stdout is not None
        assert process.stderr is not None
        self.pipes = ((process.stdout, self.output), (process.stderr, self.errors))
        """What it writes to, each with what was read from it."""
        self.heard = time.monotonic()
        """When it last announced something, or started."""
        self.end = ""
        """Why it was killed."""

    def outcome(self) -> Outcome:
        """Its report, at its end."""
        code = self.process.wait()
        end = self.end
        if code and not end:
            lines = self.errors.decode(errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it printed nothing"
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended: {last}"
        said = []
        for line in self.output.splitlines():
            try:
                said.append(json.loads(line))
            except ValueError:  # cut off by a crash
                continue
        return Outcome(said, end)


class Workers:
    """Processes that examine one device, or all; they start when this is made."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        count = min(max(len(os.sched_getaffinity(0)), 2), _MOST_WORKERS)
        read_end, write_end = os.pipe()
        os.write(write_end, array.array("H", range(_MOST_KERNELS)).tobytes())
        os.close(write_end)
        # Where a standard stream is closed, the pipe has its number, which the workers replace.
        self._claims = fcntl.fcntl(read_end, fcntl.F_DUPFD_CLOEXEC, 3)
        os.close(read_end)
        self._workers = [self._start(with_torch=i == 0) for i in range(count)]

    def _start(self, *, with_torch: bool) -> _Worker:
        path = [entry for entry in sys.path if isinstance(entry, str)]  # Python uses no others
        script = (
            "import gc, sys\n"
            "gc.disable()\n"  # importing torch is faster so
            f"sys.path[:] = {path!r}\n"  # it must find what this process finds
            "from fusedoptim.doctor._worker import main\n"
            f"main({self._device!r}, {self._claims}, {with_torch})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            pass_fds=(self._claims,),
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},  # numpy's would wait in a busy loop
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return _Worker(process)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            with worker.process as process:  # which closes its pipes, and waits for its end
                process.kill()  # if this was interrupted; else it has ended
        os.close(self._claims)

    def outcomes(self) -> list[Outcome]:
        """The report of each, when all have ended."""
        outcomes = _outcomes(self._workers)
        while not any(o.loaded for o in outcomes) and _crashed_in_a_kernel(outcomes[-1]):
            self._workers.append(self._start(with_torch=False))  # the other kernels are untested
            outcomes += _outcomes(self._workers[-1:])
        return outcomes


def _outcomes(workers: Sequence[_Worker]) -> list[Outcome]:
    """The reports of workers, when all have ended; one that hangs is killed."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            for pipe, text in worker.pipes:
                selector.register(pipe, selectors.EVENT_READ, (worker, text))
        while selector.get_map():
            for key, _ in selector.select(timeout=1):
                worker, text = key.data
                if part := os.read(key.fd, 1 << 16):
                    text += part
                    worker.heard = time.monotonic() if text is worker.output else worker.heard
                else:
                    selector.unregister(key.fileobj)
            for key in [*selector.get_map().values()]:
                worker, _ = key.data
                if time.monotonic() - worker.heard > _SECONDS:
                    worker.process.kill()
                    worker.end = f"hung: it did not get further within {_SECONDS} s"
                    selector.unregister(key.fileobj)  # which a process of its own may keep open
    return [worker.outcome() for worker in workers]


def _crashed_in_a_kernel(outcome: Outcome) -> bool:
    return (
        bool(outcome.end) and outcome.at.startswith("tests ") and not outcome.end.startswith("hung")
    )
