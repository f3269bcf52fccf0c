"""Validation of the compiled modules by spirv-val and by Intel's offline GPU compiler, ocloc.

Arc has no float64 units: its driver emulates them, if asked to. Each operation becomes a hundred,
so these modules take minutes to compile. ``emulated.json`` records those that did, and what
compiled them: only a module, an ocloc or options that changed since take that time again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fusedoptim.launch.modules import FOLDER

__all__ = ["EMULATED", "GPUS", "objections", "validate"]

GPUS = ("skl", "dg2", "pvc")  # Gen9, Arc, Data Center Max
EMULATED = Path(__file__).with_name("emulated.json")
# A hundred operations for each take long to optimize and to fit into 128 registers.
_EMULATION = '-options "-cl-opt-disable -cl-intel-256-GRF-per-thread"'
_Build = tuple[Path, str]


def validate() -> list[str]:
    """The objections of both tools to the package's modules; update their record."""
    return objections(FOLDER, EMULATED)


def objections(folder: Path, record: Path) -> list[str]:
    """The objections of both tools to the modules of a folder; update the record of them."""
    missing = [tool for tool in ("spirv-val", "ocloc") if shutil.which(tool) is None]
    if missing:
        return [f"not found: {', '.join(missing)} (apt install spirv-tools intel-opencl-icd)"]
    modules = sorted(folder.glob("*.spv"))
    emulated = [(path, "dg2") for path in modules if path.stem.endswith("_f64")]
    others = [(path, gpu) for path in modules for gpu in GPUS if (path, gpu) not in emulated]
    problems = []
    for path in modules:
        done = _run(["spirv-val", "--target-env", "opencl2.1", str(path)])
        if done.returncode != 0:
            problems.append(_problem(path.name, done))
    return problems + _compile_for_gpus(others) + _compile_emulated(emulated, record)


def _compile_emulated(builds: list[_Build], record: Path) -> list[str]:
    """The objections to float64 modules for Arc that the record does not have."""
    compiler = f"ocloc {_ocloc_version()} {_EMULATION}"
    known = json.loads(record.read_text()) if record.exists() else {}
    compiled = known["modules"] if known.get("compiler") == compiler else {}
    now = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path, _ in builds}
    changed = [build for build in builds if compiled.get(build[0].name) != now[build[0].name]]
    if not changed:
        return []
    problems = _compile_for_gpus(changed, _EMULATION, IGC_EnableDPEmulation="1")
    if not problems:
        record.write_text(json.dumps({"compiler": compiler, "modules": now}, indent=1) + "\n")
    return problems


def _ocloc_version() -> str:
    """The version of ocloc's compiler, which it writes to a file."""
    name = "OCL_DRIVER_VERSION"
    with tempfile.TemporaryDirectory() as folder:
        _run(["ocloc", "query", name], cwd=folder, check=True)
        return Path(folder, name).read_text().strip("\0 \n")


def _compile_for_gpus(builds: list[_Build], options: str = "", **variables: str) -> list[str]:
    """The objections of ocloc to modules for GPUs.

    One process compiles all, as it takes longer to start than to compile most of them. If one
    fails, which may end the process, each is compiled separately.
    """
    with tempfile.TemporaryDirectory() as folder:
        lines = [f'-spirv_input -file "{path}" -device {gpu} {options}' for path, gpu in builds]
        Path(folder, "builds.txt").write_text("\n".join(lines))
        done = _run(["ocloc", "multi", "builds.txt"], cwd=folder, env={**os.environ, **variables})
    if done.returncode == 0:
        return []
    if len(builds) == 1:
        path, gpu = builds[0]
        return [_problem(f"{path.name} for {gpu}", done)]
    return [
        problem for build in builds for problem in _compile_for_gpus([build], options, **variables)
    ]


def _run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **options)


def _problem(what: str, done: subprocess.CompletedProcess[str]) -> str:
    return f"{what}: {done.stdout}{done.stderr}".strip()
