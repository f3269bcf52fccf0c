"""Whole examinations, of this machine and of ones with several problems."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fusedoptim
from fusedoptim import __main__, doctor
from fusedoptim.doctor import _command
from fusedoptim.doctor._report import Problem, Report, Section, guarded
from fusedoptim.launch import modules
from tests.running import LIMIT, check_script, run_script

ROOT = Path(__file__).parents[3]


def run(cwd: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fusedoptim", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def test_healthy(tmp_path: Path) -> None:
    done = run(tmp_path, "doctor", "--json")
    found = json.loads(done.stdout)
    assert [problem for problem in found["problems"] if problem["level"] == "error"] == []
    assert (done.returncode, done.stderr) == (0, "")
    assert found["schema"] == 1
    assert found["fusedoptim"] == fusedoptim.__version__
    sections = found["sections"]
    assert sections["packages"]["fusedoptim"] == str(ROOT / "fusedoptim")
    count = len(modules._manifest())
    assert sections["kernels"]["as shipped"] == f"{count} of {count}"
    (cpu,) = (name for name in sections["devices"] if "cpu" in name)
    assert set(sections["self-test"]["results"][cpu].values()) == {"right"}
    assert set(sections["self-test"]["results"][cpu]) == set(modules._manifest())
    assert sections["torch"]["an update of its tensors on cpu"] == "right"
    assert any("libintelocl.so" in path for path in sections["devices"]["loaded"])
    assert sections["settings"]["torch's threads"] >= 1
    assert sections["settings"]["the CPU driver's threads"] >= 1
    assert sections["recommended settings"]


def test_little_is_right(tmp_path: Path) -> None:
    """The command itself works even if a package is shadowed and drivers are hidden."""
    (tmp_path / "allocator.py").write_text("raise SystemExit('foreign code ran')\n")
    done = run(tmp_path, "doctor", OCL_ICD_FILENAMES="/nonexistent.so")
    assert done.returncode == 1
    assert f"the name leads to {tmp_path / 'allocator.py'}" in done.stdout
    assert "  cure: rename or move that" in done.stdout
    assert "OCL_ICD_FILENAMES names /nonexistent.so, which does not exist" in done.stdout
    assert "  cure: unset OCL_ICD_FILENAMES\n" in done.stdout
    assert "foreign code ran" not in done.stdout
    assert done.stderr == ""


def test_crash_and_a_broken_torch(tmp_path: Path) -> None:
    """The kernel in which the driver crashes is named, and all others are tested."""
    for package in ("allocator", "fusedoptim", "transforms"):
        shutil.copytree(ROOT / package, tmp_path / package)
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is gone')\n")
    with open(tmp_path / "fusedoptim" / "doctor" / "_self_test.py", "a") as code:
        code.write(CRASH)
    done = run(tmp_path, "doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "tests adam_f32 on opencl:cpu:0 was killed by SIGSEGV" in done.stdout
    assert "tests sgd_split on opencl:cpu:0 was killed by SIGSEGV" in done.stdout
    assert f"{len(modules.shipped()) - 2} of {len(modules.shipped())} kernels agree" in done.stdout
    assert "torch cannot be imported: ImportError: libtorch.so is gone" in done.stdout
    assert "  cure: pip install --force-reinstall torch\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("3 errors ")


@pytest.mark.parametrize("stream", [0, 2])
def test_closed_standard_stream(stream: int) -> None:
    """Workers get a pipe, whose number theirs must not be: they would test one kernel for ever."""
    check_script(
        f"""
        import os
        from fusedoptim.doctor._workers import Workers
        os.close({stream})
        with Workers("cpu") as workers:
            assert workers._claims > 2
        """
    )


CRASH = """
_tested = kernel_problem

def kernel_problem(queue, name, *, in_usm):
    import os, signal
    if name in ("adam_f32", "sgd_split"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return _tested(queue, name, in_usm=in_usm)
"""


def test_hidden_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An entry of ``sys.path`` that is no string, which Python ignores, is no problem."""
    monkeypatch.setenv("ONEAPI_DEVICE_SELECTOR", "level_zero:gpu")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    report = doctor.examine("cpu")
    assert not any("a process that examines" in problem.message for problem in report.problems)
    (problem,) = (p for p in report.problems if p.level == "error" and "'cpu'" in p.message)
    assert "no SYCL driver serves the device 'cpu'" in problem.message
    assert "unset ONEAPI_DEVICE_SELECTOR=level_zero:gpu, which may hide it" in problem.cure
    assert any("ONEAPI_DEVICE_SELECTOR=level_zero:gpu hides" in p.message for p in report.problems)
    assert report.exit_code == 1


@pytest.mark.parametrize("device", [0, b"cpu"])
def test_device_is_no_string(device: object) -> None:
    with pytest.raises(TypeError, match=r"device=.* is neither a SYCL filter string nor None"):
        doctor.examine(device)  # type: ignore[arg-type]


class TestCommandLine:
    def test_without_a_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert __main__.main([]) == 2
        listed = capsys.readouterr().err
        assert all(name in listed for name in ("doctor", "aot"))

    def test_another_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            __main__.main(["aot", "--help"])
        assert end.value.code == 0
        assert "build" in capsys.readouterr().out

    @pytest.mark.parametrize("command", ["doctor", "aot"])
    def test_as_a_module_of_its_own(self, command: str) -> None:
        """The command can also be run as a module of the package."""
        script = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
        done = run_script(script, f"fusedoptim.{command}", "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"usage: python -m fusedoptim {command} ")

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as end:
            __main__.main(["--version"])
        assert end.value.code == 0
        assert capsys.readouterr().out == f"fusedoptim {fusedoptim.__version__}\n"

    @pytest.mark.parametrize(("level", "status"), [("warning", 0), ("error", 1)])
    def test_exit_status(
        self,
        level: str,
        status: int,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        report = Report([Section("s", {"a": 1}, [Problem(level, "it is", "do")])], 1.25)
        asked = []
        monkeypatch.setattr(doctor, "examine", lambda device: asked.append(device) or report)
        assert __main__.main(["doctor", "--device", "gpu"]) == status
        assert __main__.main(["doctor", "--json"]) == status
        assert asked == ["gpu", None]
        text, _, as_json = capsys.readouterr().out.partition("{")
        assert text.endswith(f"{level}: it is\n  cure: do\n\n1 {level} (1.2 s)\n")
        assert json.loads("{" + as_json)["verdict"] == level

    def test_output_that_cannot_be_written(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(doctor, "examine", lambda device: Report([], 1.0))
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            assert __main__.main(["doctor", "--json"]) == 1
            assert full.closed
        assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"

    def test_no_output(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "examine", lambda device: Report([], 1.0))
        monkeypatch.setattr(sys, "stdout", None)  # as Python has it where the stream is closed
        assert __main__.main(["doctor"]) == 0

    def test_help_tells_the_exit_status(self) -> None:
        assert "1 with errors" in _command._DESCRIPTION


class TestReport:
    report = Report(
        [
            Section("empty", {}, []),
            Section(
                "facts",
                {"long name": ["<a>"] * 60, "n": None, "l": [], "pair": {"a": True, "b": 2}},
                [Problem("warning", "slow & <b>", "hurry"), Problem("error", "wrong", "mend")],
                {"everything": [1, 2]},
            ),
        ],
        seconds=2.0,
    )

    def test_text(self) -> None:
        lines = repr(self.report).splitlines()
        assert "  n          none" in lines
        assert "  l          none" in lines
        assert "  pair       a: yes, b: 2" in lines
        assert max(map(len, lines)) < 110
        assert lines.index("error: wrong") < lines.index("warning: slow & <b>")
        assert lines[-1] == "1 error and 1 warning (2.0 s)"
        assert "everything" not in repr(self.report)
        assert "\x1b" not in repr(self.report)

    def test_html(self) -> None:
        page = self.report._repr_html_()
        assert "slow &amp; &lt;b&gt;" in page
        assert "&lt;a&gt;" in page
        assert "<b>wrong" not in page

    def test_dict(self) -> None:
        found = self.report.as_dict()
        assert found["sections"]["facts"]["everything"] == [1, 2]
        assert found["verdict"] == "error"
        assert found["problems"][0] == {
            "section": "facts",
            "level": "warning",
            "message": "slow & <b>",
            "cure": "hurry",
        }
        assert json.loads(self.report.json()) == found

    def test_copies(self) -> None:
        for report in (copy.deepcopy(self.report), pickle.loads(pickle.dumps(self.report))):
            assert report.as_dict() == self.report.as_dict()

    def test_no_problems(self) -> None:
        assert repr(Report([], 1.0)) == "no problems (1.0 s)"


def test_a_check_that_fails_is_a_problem() -> None:
    def check() -> Section:
        raise OSError("disk on fire")

    section = guarded("disks", check)
    (problem,) = section.problems
    assert problem.level == "error"
    assert problem.message == "the check of disks failed: OSError: disk on fire"
    assert "doctor --json" in problem.cure
