"""Devices and what runs on them, as the workers report it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from fusedoptim.doctor import _settings
from fusedoptim.doctor._drivers import INSTALL_CPU, INSTALL_GPU, intel_gpus
from fusedoptim.doctor._report import REPORT_IT, Problem, Section, error, warning
from fusedoptim.doctor._versions import REINSTALL_RUNTIME
from fusedoptim.doctor._workers import Outcome, Workers

_MOST_NAMES = 5
_INSTALL_TORCH = "pip install --force-reinstall torch"
_LIMITS = ("ONEAPI_DEVICE_SELECTOR", "OCL_ICD_FILENAMES", "SYCL_DEVICE_ALLOWLIST")
_WRONG = (
    "unset all CL_CONFIG_*, IGC_* and NEO* variables; if that does not help, install another "
    f"version of the driver, and {REPORT_IT}"
)


def sections(workers: Workers) -> Iterator[Section]:
    """The workers' findings, once the workers have ended."""
    outcomes = workers.outcomes()
    yield describe_devices(outcomes, len(intel_gpus()))
    yield describe_kernels(outcomes)
    yield describe_torch(outcomes)
    yield from _settings.sections(outcomes)


def describe_devices(outcomes: Sequence[Outcome], gpus: int) -> Section:
    """The devices and the libraries that serve them, or why there is none.

    Args:
        outcomes: the outcomes of the workers.
        gpus: how many Intel GPUs the system has.
    """
    facts: dict[str, Any] = {}
    on_host = []
    for device in (device for line in _lines(outcomes, "devices") for device in line["devices"]):
        on_host.append(device["on_host"])
        facts[device["filter_string"]] = {
            "name": device["name"],
            "driver": device["driver"],
            "memory": f"{device['memory'] / 2**30:.1f} GiB",
            "USM": list(device["kinds"]),
            "compute units": device["units"],
            "float64": device["has_float64"],
            "float16": device["has_float16"],
        }
    have = ", ".join(facts) or "none"
    for line in _lines(outcomes, "unused"):
        if line["unused"]:
            names = ", ".join(line["unused"])
            facts["not used"] = f"{names}, as another driver of that device is preferred"
    for line in _lines(outcomes, "compiled_for"):
        facts["CPU kernels are for"] = line["compiled_for"]
    for line in _lines(outcomes, "highest"):
        facts["highest instruction set"] = line["highest"]
    facts["loaded"] = sorted({path for o in outcomes for path in o.loaded})
    problems = [problem for outcome in outcomes for problem in _failures(outcome)]
    problems += [problem for outcome in outcomes for problem in _two_majors(outcome.loaded)]
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    unset = f"unset {' and '.join(limits)}, which may hide it, or " if limits else ""
    if not problems and not any(on_host):
        message = f"no driver serves the CPU (devices found: {have})"
        problems.append(error(message, f"{unset}{INSTALL_CPU}"))
    if gpus and all(on_host):
        message = f"the machine has an Intel GPU and no driver shows it (devices found: {have})"
        problems.append(warning(message, f"{unset}{INSTALL_GPU}"))
    return Section("devices", facts, list(dict.fromkeys(problems)))


def _lines(outcomes: Sequence[Outcome], key: str) -> list[dict[str, Any]]:
    """The lines with this key, of all workers."""
    return [line for outcome in outcomes for line in outcome.said if key in line]


def _failures(outcome: Outcome) -> Iterator[Problem]:
    """Why a worker did not finish."""
    if outcome.end:
        yield error(f"a process that {outcome.at} {outcome.end}", _WRONG)
    for line in _lines([outcome], "failed"):
        yield _failure(line["failed"])


def _failure(said: str) -> Problem:
    """An exception as a problem; our own messages end with the cure."""
    kind, _, text = said.partition(": ")
    message, _, cure = (text or kind).partition("; ")
    if kind.endswith(("DeviceNotFoundError", "ModuleError")):
        return error(message, cure or INSTALL_CPU)
    if kind in ("ImportError", "ModuleNotFoundError"):
        return error(message, cure or REINSTALL_RUNTIME)
    variable = re.search(r"\b[A-Z]+(_[A-Z]+)+(?==)", message)
    unset = f"unset {variable[0]}" if variable else _WRONG
    return error(f"a process that asks the driver fails: {kind}: {message}", cure or unset)


def _two_majors(loaded: Sequence[str]) -> Iterator[Problem]:
    """SYCL runtimes of two versions in one process, which cannot share a queue."""
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
    """The results of the kernels' self-tests."""
    facts: dict[str, Any] = {}
    results: dict[str, dict[str, str]] = {}
    problems = []
    total = max((line["planned"] for line in _lines(outcomes, "planned")), default=0)
    tested = _lines(outcomes, "tested")
    for device in dict.fromkeys(line["device"] for line in tested):
        lines = [line for line in tested if line["device"] == device]
        right = sum(line["problem"] == "" for line in lines)
        skipped = sum(line["problem"] is None for line in lines)
        facts[device] = f"{right} of {total} kernels agree with their source in float64" + (
            f"; {skipped} need float64, which the device lacks" if skipped else ""
        )
        results[device] = {
            line["tested"]: "no float64" if line["problem"] is None else line["problem"] or "right"
            for line in lines
        }
        wrong: dict[str, list[str]] = {}
        for line in lines:
            if line["problem"]:  # reported about one kernel
                reason = line["problem"].replace(f" {line['tested']};", ";")
                wrong.setdefault(reason, []).append(line["tested"])
        for problem, names in wrong.items():
            message, _, cure = problem.partition("; ")
            problems.append(error(f"{_listed(names)} on {device} {message}", cure or _WRONG))
    return Section("self-test", facts, problems, {"results": results})


def _listed(names: Sequence[str]) -> str:
    """Some names, and the number of the others."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more kernels" if more > 0 else "")


def describe_torch(outcomes: Sequence[Outcome]) -> Section:
    """Whether torch can be imported and its tensors updated."""
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
