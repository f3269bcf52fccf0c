"""What workers report of devices, kernels and torch: each problem and its cure are named."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

import allocator
from fusedoptim.doctor import _devices, _worker, _workers
from fusedoptim.doctor._report import Section
from fusedoptim.doctor._workers import Outcome
from fusedoptim.launch.devices import BACKENDS

CPU = {
    "filter_string": "opencl:cpu:0",
    "name": "A CPU",
    "driver": "1",
    "memory": 2**30,
    "kinds": ["host"],
    "units": 2,
    "has_float64": True,
    "has_float16": False,
    "on_host": True,
}


def result(kernel: str, problem: str | None) -> dict[str, Any]:
    """A worker's report on a kernel that it has tested."""
    return {"tested": kernel, "device": "opencl:cpu:0", "problem": problem}


def devices(
    *said: dict[str, Any], end: str = "", found: Sequence[Any] = (CPU,), gpus: int = 0
) -> Section:
    lines = [{"devices": list(found)}, {"devices": list(found)}, *said]  # from two workers
    return _devices.describe_devices([Outcome(lines, end)], gpus)


def ended(script: str) -> Outcome:
    """The outcome of a worker that runs a shell script."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(["sh", "-c", script], **pipes)
    with process:
        (outcome,) = _workers._outcomes([_workers._Worker(process)])
    assert process.returncode is not None
    return outcome


class TestDevices:
    def test_healthy(self) -> None:
        section = devices({"loaded": ["/a/libsycl.so.9"]})
        assert section.problems == []
        assert section.facts["opencl:cpu:0"]["memory"] == "1.0 GiB"

    def test_crash(self) -> None:
        """A driver that crashes, in a process of its own."""
        line = json.dumps({"at": "tests adam_f32 on opencl:cpu:0"})
        outcome = ended(f"echo '{line}'; printf '{{\"cut'; kill -SEGV $$")
        (problem,) = _devices.describe_devices([outcome, outcome], 0).problems
        assert problem.level == "error"
        assert problem.message == (
            "a process that tests adam_f32 on opencl:cpu:0 was killed by SIGSEGV"
        )
        assert "another version of the driver" in problem.cure

    def test_other_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert ended("echo first >&2; echo last >&2; exit 3").end == "ended: last"
        monkeypatch.setattr(_workers, "_SECONDS", 1)
        for script in ("exec sleep 60", "while :; do echo again >&2; sleep .1; done"):
            assert ended(script).end == "hung: it did not get further within 1 s"

    def test_slow(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """However long a worker takes, it does not hang while it announces actions."""
        monkeypatch.setattr(_workers, "_SECONDS", 2)
        line = json.dumps({"at": "tests adam_f32 on opencl:cpu:0"})
        outcome = ended(f"for i in 1 2 3 4; do echo '{line}'; sleep .8; done")
        assert (outcome.end, len(outcome.said)) == ("", 4)

    def test_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SYCL_DEVICE_ALLOWLIST", "DeviceName:x")
        (problem,) = devices(found=()).problems
        assert "no driver serves the CPU (devices found: none)" in problem.message
        assert "unset SYCL_DEVICE_ALLOWLIST=DeviceName:x" in problem.cure
        assert "pip install --force-reinstall intel-opencl-rt" in problem.cure

    def test_gpu_that_no_driver_shows(self) -> None:
        (problem,) = devices(gpus=1).problems
        assert "(devices found: opencl:cpu:0)" in problem.message
        assert "apt install" in problem.cure
        gpu = CPU | {"filter_string": "level_zero:gpu:0", "on_host": False}
        assert devices(found=(CPU, gpu), gpus=1).problems == []

    @pytest.mark.parametrize(
        ("failed", "message", "cure"),
        [
            ("a.DeviceNotFoundError: no x; unset y", "no x", "unset y"),
            ("ImportError: dpctl is gone", "dpctl is gone", "pip install --force-reinstall dpctl"),
            ("fusedoptim.launch.modules.ModuleError: no k; reinstall", "no k", "reinstall"),
            ("ValueError: SOME_VAR='x' is none", "SOME_VAR='x' is none", "unset SOME_VAR"),
            ("RuntimeError: odd", "fails: RuntimeError: odd", "doctor --json"),
            ("RuntimeError: two were brought; install the dpctl", "were brought", "install the"),
        ],
    )
    def test_failures(self, failed: str, message: str, cure: str) -> None:
        (problem,) = devices({"failed": failed}).problems
        assert message in problem.message
        assert cure in problem.cure

    def test_two_runtimes(self) -> None:
        """Two runtimes are a problem in one process, but not in two."""
        ours, others = (
            {"loaded": [f"/{i}/libsycl.so.{i}", f"/{i}/libsycl.so.{i}.0.0"]} for i in (8, 9)
        )
        outcomes = [Outcome([{"devices": [CPU]}, ours], ""), Outcome([others], "")]
        assert _devices.describe_devices(outcomes, 0).problems == []
        (problem,) = devices(ours, others).problems
        assert "different major versions: /8/libsycl.so.8 and /9/libsycl.so.9" in problem.message
        assert "pip show torch" in problem.cure

    def test_another_cpu_driver_is_not_used(self) -> None:
        own = allocator.queue("cpu").sycl_device.filter_string
        cpu, xpu = BACKENDS["cpu"], BACKENDS["xpu"]
        found = {"opencl:cpu:7": cpu, own: cpu, "level_zero:gpu:0": xpu}
        assert _worker._used(found) == [own, "level_zero:gpu:0"]
        section = devices({"unused": ["opencl:cpu:7"]})
        assert section.facts["not used"].startswith("opencl:cpu:7, as another driver")


class TestKernelsOnDevices:
    def test_wrong_kernels(self) -> None:
        said = [
            {"planned": 4},
            result("a", ""),
            result("b", "is off"),
            result("c", "is off"),
            result("d", None),
        ]
        section = _devices.describe_kernels([Outcome(said, "")])
        assert section.facts["opencl:cpu:0"] == (
            "1 of 4 kernels agree with their source in float64; "
            "1 need float64, which the device lacks"
        )
        (problem,) = section.problems
        assert problem.message == "b, c on opencl:cpu:0 is off"
        assert section.details["results"]["opencl:cpu:0"]["d"] == "no float64"

    def test_many_wrong_kernels(self) -> None:
        said = [result(f"k{i}", "is off") for i in range(45)]
        (problem,) = _devices.describe_kernels([Outcome(said, "")]).problems
        assert problem.message == "k0, k1, k2, k3, k4 and 40 more kernels on opencl:cpu:0 is off"

    def test_a_driver_that_builds_none(self) -> None:
        said = [result(k, f"cannot build the kernel {k}; change the driver") for k in ("a", "b")]
        (problem,) = _devices.describe_kernels([Outcome(said, "")]).problems
        assert problem.message == "a, b on opencl:cpu:0 cannot build the kernel"
        assert problem.cure == "change the driver"

    def test_kernels_that_were_not_reached(self) -> None:
        outcomes = [Outcome([{"planned": 3}, result("a", "")], "was killed by SIGSEGV")]
        outcomes += [Outcome([result("b", "")], "")]
        assert _devices.describe_kernels(outcomes).facts["opencl:cpu:0"].startswith("2 of 3")


class TestTorch:
    def test_healthy(self) -> None:
        said = [{"torch": "2.13.0", "places": ["cpu"]}, {"updated": "cpu", "problem": ""}]
        section = _devices.describe_torch([Outcome(said, "")])
        assert section.problems == []
        assert section.facts["version"] == "2.13.0"

    def test_cannot_be_imported(self) -> None:
        said = [{"torch_failed": "ImportError: libtorch.so is gone"}]
        (problem,) = _devices.describe_torch([Outcome(said, "")]).problems
        assert problem.message == "torch cannot be imported: ImportError: libtorch.so is gone"
        assert problem.cure == "pip install --force-reinstall torch"

    def test_wrong_update(self) -> None:
        said = [{"updated": "xpu:0", "problem": "is off by up to 0.5"}]
        (problem,) = _devices.describe_torch([Outcome(said, "")]).problems
        assert problem.message == "an update of its tensors on xpu:0 is off by up to 0.5"
