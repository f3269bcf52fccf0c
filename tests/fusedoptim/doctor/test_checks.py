"""Each check, where something is broken, names the problem and the cure."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from fusedoptim import _processor
from fusedoptim.doctor import _drivers, _environment, _machine, _package, _versions
from fusedoptim.doctor._report import Problem
from fusedoptim.launch import modules


def only(problems: Sequence[Problem], text: str) -> Problem:
    """The one problem whose message contains ``text``."""
    (found,) = (problem for problem in problems if text in problem.message)
    return found


class TestVersions:
    @pytest.fixture
    def versions(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
        """Versions to report in place of the installed ones."""
        changed: dict[str, str | None] = {}
        installed = _versions.version_of

        def version_of(name: str) -> str | None:
            return changed[name] if name in changed else installed(name)

        monkeypatch.setattr(_versions, "version_of", version_of)
        return changed

    @pytest.mark.parametrize("version", ["0.16.9", "0.23.0", "1.0"])
    def test_dpctl_out_of_range(self, version: str, versions: dict[str, str | None]) -> None:
        versions["dpctl"] = version
        problem = only(_versions.check().problems, "dpctl is " + version)
        assert problem.level == "error"
        assert "requires dpctl<0.23,>=0.17" in problem.message
        assert problem.cure == "pip install 'dpctl<0.23,>=0.17'"

    @pytest.mark.parametrize("version", ["0.17", "0.17.0", "0.22.9rc1", "0.22.1+local"])
    def test_dpctl_in_range(self, version: str, versions: dict[str, str | None]) -> None:
        versions["dpctl"] = version
        assert not [p for p in _versions.check().problems if p.message.startswith("dpctl is")]

    def test_missing_torch(self, versions: dict[str, str | None]) -> None:
        versions["torch"] = None
        section = _versions.check()
        assert section.facts["torch"] is None
        assert only(section.problems, "torch is not installed").cure == "pip install 'torch>=2.13'"

    def test_runtime_of_two_releases(self, versions: dict[str, str | None]) -> None:
        versions["intel-sycl-rt"], versions["intel-cmplr-lib-ur"] = "2024.2.1", "2026.2.0"
        problem = only(_versions.check().problems, "two oneAPI releases")
        assert "intel-sycl-rt 2024.2.1 and intel-cmplr-lib-ur 2026.2.0" in problem.message
        assert "pip install --force-reinstall" in problem.cure

    def test_another_libsycl(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        interface = tmp_path / "libDPCTLSyclInterface.so"
        interface.write_bytes(b"\x7fELF\0libsycl.so.5\0")
        installed = _versions.installed_file
        monkeypatch.setattr(
            _versions,
            "installed_file",
            lambda name, pattern: interface if name == "dpctl" else installed(name, pattern),
        )
        problem = only(_versions.check().problems, "needs libsycl.so.5")
        assert "has libsycl.so." in problem.message
        assert "pip install" in problem.cure

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> list[str]:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "requires", missing)
        assert "pip install" in only(_versions.check().problems, "not installed").cure

    def test_this_environment(self) -> None:
        assert _versions.check().problems == []


class TestKernels:
    @pytest.fixture
    def folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """A copy of the shipped kernels, from which they are loaded."""
        folder = tmp_path / "spirv"
        shutil.copytree(modules.FOLDER, folder)
        monkeypatch.setattr(modules, "FOLDER", folder)
        monkeypatch.setattr(modules, "MANIFEST", folder / "manifest.json")
        return folder

    def test_damaged(self, folder: Path) -> None:
        with open(folder / "adam_f32.spv", "ab") as module:
            module.write(b"\0")
        section = _package.check_kernels()
        (problem,) = section.problems
        assert "kernel adam_f32 is not the one that was shipped" in problem.message
        assert "pip install --force-reinstall --no-deps . in a clone" in problem.cure
        assert (
            section.facts["as shipped"]
            == f"{len(modules.shipped()) - 1} of {len(modules.shipped())}"
        )

    def test_missing(self, folder: Path) -> None:
        (folder / "sgd_f64.spv").unlink()
        (problem,) = _package.check_kernels().problems
        assert "sgd_f64 cannot be read" in problem.message

    def test_machine_code(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        code = tmp_path / "code"
        monkeypatch.setattr(_package, "CODE", code)
        (missing,) = _package.check_kernels().problems
        assert "No such file" in missing.message
        code.write_bytes(b"\xc3")
        (altered,) = _package.check_kernels().problems
        assert "the machine code" in altered.message
        assert "--force-reinstall" in altered.cure

    @pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', "\xff", None])
    def test_manifest(self, text: str | None, folder: Path) -> None:
        manifest = folder / "manifest.json"
        manifest.unlink()
        if text is not None:
            manifest.write_bytes(text.encode("latin-1"))
        (problem,) = _package.check_kernels().problems
        assert problem.level == "error"
        assert f"the manifest {manifest} " in problem.message
        assert ("No such file" in problem.message) == (text is None)
        assert "--force-reinstall" in problem.cure

    def test_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The doctor warns where programs cannot be kept; an optimizer says nothing of it."""
        file = tmp_path / "file"
        file.touch()
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        places = {"": 0, str(tmp_path / "new" / "cache"): 0, str(file / "cache"): 1, str(file): 1}
        places[str(shared)] = 1
        for place, count in places.items():
            monkeypatch.setenv("FUSEDOPTIM_CACHE_DIR", place)
            section = _package.check_kernels()
            problems = [
                (p.level, f"cannot be kept in {place}:" in p.message) for p in section.problems
            ]
            assert problems == [("warning", True)] * count
            assert (place or "none: ") in section.facts["cache of programs"]


class TestNames:
    def test_shadowed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "transforms.py").write_text("raise SystemExit('foreign code ran')\n")
        monkeypatch.delitem(sys.modules, "transforms", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))
        section = _package.check_names()
        (problem,) = section.problems
        assert str(tmp_path / "transforms.py") in problem.message
        assert problem.cure.startswith("rename or move that")
        assert section.facts["transforms"] == "not ours"

    def test_overwritten(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        foreign = tmp_path / "__init__.py"
        foreign.write_text("__version__ = '1.2.0'\n")
        monkeypatch.setattr(_package, "own_file", lambda name: foreign)
        problems = _package.check_names().problems
        assert "(its mark is None)" in only(problems, "'allocator' was installed over it").message
        assert all("uninstall that one" in problem.cure for problem in problems)

    def test_another_distribution(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = SimpleNamespace(version="1.2.0", locate_file=lambda name: "/site")
        monkeypatch.setattr(
            importlib.metadata,
            "distributions",
            lambda name: [other] if name == "allocator" else [],
        )
        (problem,) = _package.check_names().problems
        assert "the distribution allocator 1.2.0, which is not ours" in problem.message
        assert problem.cure.startswith("pip uninstall allocator")

    def test_two_of_ours(self, monkeypatch: pytest.MonkeyPatch) -> None:
        two = [
            SimpleNamespace(version=version, locate_file=lambda name: "/site")
            for version in ("0.1", "0.2")
        ]
        monkeypatch.setattr(
            importlib.metadata,
            "distributions",
            lambda name: two if name == "fusedoptim" else [],
        )
        (problem,) = _package.check_names().problems
        assert "0.1 in /site, 0.2 in /site" in problem.message

    def test_this_environment(self) -> None:
        assert _package.check_names().problems == []


class TestMachine:
    @pytest.mark.parametrize("group", ["", "user.slice/own.scope"])
    def test_control_group(
        self, group: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """The control group's own limit counts, and so do those of the groups above it."""
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text("max 100000\n")
        (tmp_path / "cpu.max").write_text("150000 100000\n")
        (tmp_path / "cgroup").write_text(f"1:name=systemd:/\n0::/{group}\n")
        monkeypatch.setattr(_machine, "_CGROUPS", tmp_path)
        monkeypatch.setattr(_machine, "_MEMBERSHIP", tmp_path / "cgroup")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
        section = _machine.check()
        assert section.facts["limit of the control group"] == "1.5 processors"
        problem = only(section.problems, "control group allows 1.5")
        assert "starts 64 threads" in problem.message
        assert "taskset -c 0-1" in problem.cure

    def test_little_shared_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20, total=64 << 20)
        )
        problem = only(_machine.check().problems, "/dev/shm has 64 MiB free")
        assert "--shm-size" in problem.cure

    @pytest.mark.parametrize(
        ("flags", "text"), [("fpu sse4_2 avx", "no AVX2"), ("fpu", "no SSE4.2")]
    )
    def test_old_processor(
        self, flags: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text(f"model name\t: Old: One\nflags\t\t: {flags}\n\nmodel name\t: x\n")
        monkeypatch.setattr(_processor, "PROCESSORS", cpuinfo)
        section = _machine.check()
        assert section.facts["processor"] == "Old: One"
        assert "virtual" in only(section.problems, text).cure

    def test_forked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forked = SimpleNamespace(is_forked=lambda: True)
        monkeypatch.setitem(sys.modules, "fusedoptim.allocator", forked)
        problem = only(_machine.check().problems, "was forked after")
        assert "set_start_method('spawn')" in problem.cure


class TestEnvironment:
    @pytest.mark.parametrize(
        ("name", "value", "text", "cure"),
        [
            ("ONEAPI_DEVICE_SELECTOR", "opencl:cpu", "backend opencl finds none", "'*:cpu'"),
            ("SYCL_DEVICE_FILTER", "cpu", "has no effect", "unset SYCL_DEVICE_FILTER"),
            ("CL_CONFIG_USE_FAST_RELAXED_MATH", "True", "approximate", "unset CL_CONFIG_USE_FAST"),
            ("CL_CONFIG_USE_VECTORIZER", "False", "kernels are slow", "unset CL_CONFIG_USE_VECT"),
            ("CL_CONFIG_DUMP_BIN", "true", "writes files", "unset CL_CONFIG_DUMP_BIN"),
            ("SYCL_UR_TRACE", "-1", "prints every call", "unset SYCL_UR_TRACE"),
        ],
    )
    def test_surprises(
        self, name: str, value: str, text: str, cure: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(name, value)
        section = _environment.check()
        assert cure in only(section.problems, text).cure
        assert repr(value) in section.facts[name]

    def test_others_are_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KMP_BLOCKTIME", "1")
        monkeypatch.setenv("CL_CONFIG_DUMP_BIN", "False")
        section = _environment.check()
        assert section.facts["KMP_BLOCKTIME"] == "'1': " + _environment.meaning("KMP_BLOCKTIME")
        assert section.problems == []


class TestDrivers:
    @pytest.fixture(autouse=True)
    def _no_gpu(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "OCL_ICD_FILENAMES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(_drivers, "_DRM", tmp_path / "drm")
        monkeypatch.setattr(_drivers, "_DEVICES", tmp_path / "dri")
        monkeypatch.setattr(_drivers, "_VENDORS", tmp_path / "vendors")

    @pytest.fixture
    def gpu(self, tmp_path: Path) -> Path:
        """The device node of an Intel GPU, next to another vendor's device."""
        for node, vendor in (("renderD128", "0x8086"), ("renderD129", "0x10de")):
            (tmp_path / "drm" / node / "device").mkdir(parents=True)
            (tmp_path / "drm" / node / "device" / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "dri").mkdir()
        node = tmp_path / "dri" / "renderD128"
        node.touch()
        return node

    def test_this_environment(self) -> None:
        section = _drivers.check()
        assert section.problems == []
        assert "/libintelocl.so" in section.facts["CPU driver"]

    def test_no_cpu_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_drivers, "installed_file", lambda name, pattern: None)
        problem = only(_drivers.check().problems, "libintelocl.so of intel-opencl-rt")
        assert problem.cure == "pip install --force-reinstall intel-opencl-rt"

    def test_list_of_drivers_to_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OCL_ICD_FILENAMES", "/nonexistent.so:by_name.so")
        problem = only(_drivers.check().problems, "OCL_ICD_FILENAMES names /nonexistent.so")
        assert problem.cure == "unset OCL_ICD_FILENAMES"

    def test_rest_of_a_driver(self, tmp_path: Path) -> None:
        (tmp_path / "vendors").mkdir()
        (tmp_path / "vendors" / "old.icd").write_text("/gone/libold.so\n")
        (tmp_path / "vendors" / "named.icd").write_text("libnamed.so\n")
        section = _drivers.check()
        (problem,) = section.problems
        assert "registers /gone/libold.so, which does not exist" in problem.message
        assert f"delete {tmp_path / 'vendors' / 'old.icd'}" in problem.cure
        assert section.facts["OpenCL drivers of the system"]["named.icd"] == "libnamed.so"

    def test_stale_runtime(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "libsycl.so.7").touch()
        own = _versions.installed_file("intel-sycl-rt", "libsycl.so")
        assert own is not None
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:/nonexistent:{own.parent}")
        (problem,) = _drivers.check().problems
        assert f"LD_LIBRARY_PATH has {tmp_path}, whose libsycl.so.7" in problem.message
        assert "unset LD_LIBRARY_PATH" in problem.cure

    def test_gpu(self, gpu: Path) -> None:
        section = _drivers.check()
        assert section.facts["Intel GPUs"] == ["renderD128"]
        assert not [p for p in section.problems if "may not open" in p.message]

    def test_gpu_outside_of_the_container(self, gpu: Path) -> None:
        gpu.unlink()
        assert "--device /dev/dri" in only(_drivers.check().problems, "not in this container").cure

    def test_gpu_of_others(self, gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "access", lambda path, mode: path != gpu)
        assert "usermod -aG render" in only(_drivers.check().problems, "may not open").cure

    def test_gpu_without_a_driver(self, gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_drivers, "_SYSTEM_FOLDERS", ())
        problem = only(_drivers.check().problems, "no driver for computing")
        assert "apt install intel-opencl-icd" in problem.cure
