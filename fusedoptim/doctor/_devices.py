"""Devices and what runs on them, found out by processes of their own.

A driver may crash the process that asks it, and it answers a process that has asked before as it
did then. So each examination starts fresh processes, which share the kernels among them: a process
compiles on one core only. One of them imports torch first.
"""

from __future__ import annotations

import array
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fusedoptim.doctor._drivers import INSTALL_GPU, intel_gpus
from fusedoptim.doctor._report import REPORT_IT, Problem, Section, error, warning
from fusedoptim.doctor._versions import REINSTALL_RUNTIME

_MOST_WORKERS = 4
_MOST_NAMES = 5
_MOST_KERNELS = 4096
_SECONDS = 120  # after which a worker counts as hung; a healthy one on the CPU takes 2 or 3
_INSTALL_TORCH = "pip install --force-reinstall torch"
_INSTALL_CPU = "pip install --force-reinstall intel-opencl-rt"
_LIMITS = ("ONEAPI_DEVICE_SELECTOR", "OCL_ICD_FILENAMES", "SYCL_DEVICE_ALLOWLIST")
_WRONG = (
    "unset what CL_CONFIG_*, IGC_* and NEO* variables there are; if it stays, install another "
    f"version of the driver, and {REPORT_IT}"
)


class Outcome(NamedTuple):
    """What one worker told, and how it ended."""

    said: list[dict[str, Any]]
    """its lines."""
    end: str
    """how it failed to end by itself, or nothing."""

    @property
    def at(self) -> str:
        """What it was about to do when it was last heard of."""
        at = [line["at"] for line in self.said if "at" in line]
        return at[-1] if at else "examines the devices"


class Workers:
    """Processes that examine the devices; they start when this is made."""

    def __init__(self, device: str | None) -> None:
        """Start them.

        Args:
            device: a SYCL filter string, to examine one device alone; None for all.
        """
        self._device = device
        self._started = time.monotonic()
        count = min(max(len(os.sched_getaffinity(0)), 2), _MOST_WORKERS)
        self._claims, write_end = os.pipe()
        os.write(write_end, array.array("H", range(_MOST_KERNELS)).tobytes())
        os.close(write_end)
        self._processes = [self._start(with_torch=i == 0) for i in range(count)]

    def _start(self, *, with_torch: bool) -> subprocess.Popen[str]:
        script = (
            "import gc, sys\n"
            "gc.disable()\n"  # a tenth of the time of importing torch
            f"sys.path[:] = {sys.path!r}\n"  # it must find what this process finds
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

    def sections(self) -> Iterator[Section]:
        """What they found, when they have ended."""
        outcomes = [_outcome(process, self._started) for process in self._processes]
        while not any(map(_loaded, outcomes)) and _crashed_in_a_kernel(outcomes[-1]):
            self._processes.append(self._start(with_torch=False))  # the other kernels are untested
            outcomes.append(_outcome(self._processes[-1], self._started))
        yield describe_devices(outcomes, len(intel_gpus()))
        yield describe_kernels(outcomes)
        yield describe_torch(outcomes)


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


def describe_devices(outcomes: Sequence[Outcome], gpus: int) -> Section:
    """The devices, the libraries that serve them, and why there is none.

    Args:
        outcomes: of the workers.
        gpus: how many Intel GPUs the system knows.
    """
    facts: dict[str, Any] = {}
    for device in (device for line in _lines(outcomes, "devices") for device in line["devices"]):
        facts[device["filter_string"]] = {
            "name": device["name"],
            "driver": device["driver"],
            "memory": f"{device['memory'] / 2**30:.1f} GiB",
            "USM": list(device["kinds"]),
            "compute units": device["units"],
            "float64": device["has_float64"],
            "float16": device["has_float16"],
        }
    names = list(facts)
    for line in _lines(outcomes, "unused"):
        if line["unused"]:
            facts["not used"] = f"{', '.join(line['unused'])}, as Intel's CPU driver is there"
    for line in _lines(outcomes, "compiled_for"):
        facts["CPU kernels are for"] = line["compiled_for"]
    for line in _lines(outcomes, "highest"):
        facts["highest instruction set"] = line["highest"]
    facts["loaded"] = sorted({path for o in outcomes for path in _loaded(o)})
    problems = [problem for outcome in outcomes for problem in _failures(outcome)]
    problems += [problem for outcome in outcomes for problem in _two_majors(_loaded(outcome))]
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    unset = f"unset {' and '.join(limits)}, which may hide it, or " if limits else ""
    have = ", ".join(names) or "none"
    if not problems and not any("cpu" in name for name in names):
        message = f"no driver serves the CPU (devices found: {have})"
        problems.append(error(message, f"{unset}{_INSTALL_CPU}"))
    if gpus and not any("gpu" in name for name in names):
        message = f"the machine has an Intel GPU and no driver shows it (devices found: {have})"
        problems.append(warning(message, f"{unset}{INSTALL_GPU}"))
    return Section("devices", facts, list(dict.fromkeys(problems)))


def _lines(outcomes: Sequence[Outcome], key: str) -> list[dict[str, Any]]:
    """The lines with this key, of all workers."""
    return [line for outcome in outcomes for line in outcome.said if key in line]


def _loaded(outcome: Outcome) -> list[str]:
    """The libraries that it names as its last words."""
    return [path for line in _lines([outcome], "loaded") for path in line["loaded"]]


def _failures(outcome: Outcome) -> Iterator[Problem]:
    """What kept a worker from finishing."""
    if outcome.end:
        yield error(f"a process that {outcome.at} {outcome.end}", _WRONG)
    for line in _lines([outcome], "failed"):
        yield _failure(line["failed"])


def _failure(said: str) -> Problem:
    """An exception as a problem; the messages of our own end with the cure."""
    kind, _, text = said.partition(": ")
    message, _, cure = (text or kind).partition("; ")
    if kind.endswith(("DeviceNotFoundError", "ModuleError")):
        return error(message, cure or _INSTALL_CPU)
    if kind in ("ImportError", "ModuleNotFoundError"):
        return error(message, cure or REINSTALL_RUNTIME)
    variable = re.search(r"\b[A-Z]+(_[A-Z]+)+(?==)", message)
    unset = f"unset {variable[0]}" if variable else _WRONG
    return error(f"a process that asks the driver fails: {kind}: {message}", cure or unset)


def _two_majors(loaded: Sequence[str]) -> Iterator[Problem]:
    """Runtimes of two versions in one process: a queue cannot pass between them."""
    majors: dict[str, str] = {}
    for path in loaded:
        name = os.path.basename(path)
        if name.startswith("libsycl.so."):
            majors.setdefault(name.split(".")[2], path)
    if len(majors) > 1:
        paths = " and ".join(majors[major] for major in sorted(majors))
        yield error(
            f"a process loads SYCL runtimes of different major versions: {paths}",
            "install the dpctl whose intel-sycl-rt is the one that torch requires (pip show torch)",
        )


def describe_kernels(outcomes: Sequence[Outcome]) -> Section:
    """What each kernel's self-test found."""
    facts: dict[str, Any] = {}
    results: dict[str, dict[str, str]] = {}
    problems = []
    total = max((line["planned"] for line in _lines(outcomes, "planned")), default=0)
    tested = _lines(outcomes, "tested")
    for device in dict.fromkeys(line["device"] for line in tested):
        lines = [line for line in tested if line["device"] == device]
        right = sum(line["problem"] == "" for line in lines)
        skipped = sum(line["problem"] is None for line in lines)
        facts[device] = f"{right} of {total} kernels agree with their formulas in float64" + (
            f"; {skipped} need float64, which the device lacks" if skipped else ""
        )
        results[device] = {
            line["tested"]: "no float64" if line["problem"] is None else line["problem"] or "right"
            for line in lines
        }
        wrong: dict[str, list[str]] = {}
        for line in lines:
            if line["problem"]:  # said of one kernel
                reason = line["problem"].replace(f" {line['tested']};", ";")
                wrong.setdefault(reason, []).append(line["tested"])
        for problem, names in wrong.items():
            message, _, cure = problem.partition("; ")
            problems.append(error(f"{_listed(names)} on {device} {message}", cure or _WRONG))
    return Section("self-test", facts, problems, {"results": results})


def _listed(names: Sequence[str]) -> str:
    """Some names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more kernels" if more > 0 else "")


def describe_torch(outcomes: Sequence[Outcome]) -> Section:
    """Whether torch can be imported, and its tensors updated."""
    facts: dict[str, Any] = {}
    problems: list[Problem] = []
    for line in _lines(outcomes, "torch"):
        facts |= {"version": line["torch"], "devices": line["places"]}
    for line in _lines(outcomes, "updated"):
        what = f"an update of its tensors on {line['updated']}"
        facts[what] = line["problem"] or "right"
        if line["problem"]:
            problems.append(error(f"{what} {line['problem']}", _WRONG))
    for line in _lines(outcomes, "torch_failed"):
        problems.append(error(f"torch cannot be imported: {line['torch_failed']}", _INSTALL_TORCH))
    return Section("torch", facts, problems)
