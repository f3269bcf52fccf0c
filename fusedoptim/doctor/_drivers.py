"""OpenCL and Level Zero drivers, as files: which are registered, which can be loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fusedoptim.doctor._report import Problem, Section, error, warning
from fusedoptim.doctor._versions import installed_file

_VENDORS = Path("/etc/OpenCL/vendors")
_SYSTEM_FOLDERS = tuple(
    map(Path, ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib"))
)
_DRM = Path("/sys/class/drm")
_DEVICES = Path("/dev/dri")
_INTEL = "0x8086"
INSTALL_GPU = (
    "install its driver (Debian and Ubuntu: apt install intel-opencl-icd libze1 libze-intel-gpu1)"
)
# What setvars.sh of oneAPI puts in front of the libraries that pip installed.
_RUNTIME = ("libsycl.so.*", "libur_loader.so.*", "libOpenCL.so.*", "libintelocl.so", "libtbb.so.*")


def check() -> Section:
    """The drivers that are registered, and Intel's GPUs that lack one."""
    own_driver = installed_file("intel-opencl-rt", "libintelocl.so")
    listed = os.environ.get("OCL_ICD_FILENAMES")
    icds = _icd_files()
    gpus = intel_gpus()
    facts: dict[str, Any] = {
        "OpenCL loader": _path(
            installed_file("intel-opencl-rt", "libOpenCL.so.1") or _system_file("libOpenCL.so.1")
        ),
        "CPU driver": _path(own_driver),
        "OpenCL C compiler": _path(installed_file("intel-opencl-rt", "libcommon_clang.so")),
        "OpenCL drivers of the system": {icd.name: library for icd, library in icds.items()},
        "Level Zero loader": _path(_system_file("libze_loader.so.1")),
        "Level Zero GPU driver": _path(_system_file("libze_intel_gpu.so.1")),
        "Intel GPUs": [gpu.name for gpu in gpus],
    }
    if listed is not None:
        facts["OCL_ICD_FILENAMES"] = listed
    problems = [
        *_missing_drivers(own_driver, listed),
        *_broken_icds(icds),
        *_stale_libraries(os.environ.get("LD_LIBRARY_PATH", "")),
        *_missing_preloads(os.environ.get("LD_PRELOAD", "")),
        *_gpu_problems(gpus),
    ]
    return Section("drivers", facts, problems)


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _system_file(pattern: str) -> Path | None:
    folders = [Path(f) for f in os.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    found = (path for folder in (*folders, *_SYSTEM_FOLDERS) for path in folder.glob(pattern))
    return next(found, None)


def _icd_files() -> dict[Path, str]:
    """Each registration file of the system, and the library that it names."""
    return {icd: icd.read_text().strip() for icd in sorted(_VENDORS.glob("*.icd"))}


def _missing_drivers(own_driver: Path | None, listed: str | None) -> Iterator[Problem]:
    if own_driver is None and not listed:
        yield error(
            "the CPU driver, libintelocl.so of intel-opencl-rt, is not installed",
            "pip install --force-reinstall intel-opencl-rt",
        )
    for name in (listed or "").split(":"):
        if name and os.path.isabs(name) and not Path(name).exists():
            yield error(
                f"OCL_ICD_FILENAMES names {name}, which does not exist; while it is set, the CPU "
                "driver that pip installed is not added",
                "unset OCL_ICD_FILENAMES",
            )


def _broken_icds(icds: dict[Path, str]) -> Iterator[Problem]:
    for icd, library in icds.items():
        if os.path.isabs(library) and not Path(library).exists():
            yield warning(
                f"{icd} registers {library}, which does not exist: the rest of a driver that was "
                "removed",
                f"install that driver again, or delete {icd}",
            )


def _stale_libraries(search_path: str) -> Iterator[Problem]:
    """SYCL runtimes that the linker takes before those that pip installed."""
    own = {path.parent for path in (installed_file("intel-sycl-rt", "libsycl.so"),) if path}
    for folder in filter(None, search_path.split(":")):
        names = sorted({p.name for pattern in _RUNTIME for p in Path(folder).glob(pattern)})
        if names and Path(folder).resolve() not in own:
            yield warning(
                f"LD_LIBRARY_PATH has {folder}, whose {', '.join(names[:3])} may be loaded "
                "instead of those that pip installed",
                "unset LD_LIBRARY_PATH, or work in a shell without oneAPI's setvars.sh",
            )


def _missing_preloads(preload: str) -> Iterator[Problem]:
    for name in preload.replace(":", " ").split():
        if os.path.isabs(name) and not Path(name).exists():
            yield warning(f"LD_PRELOAD names {name}, which does not exist", "unset LD_PRELOAD")


def intel_gpus() -> Sequence[Path]:
    """The render node of each GPU of Intel's that the kernel has a driver for."""
    nodes = []
    for node in sorted(_DRM.glob("renderD*")):
        vendor = node / "device" / "vendor"
        if vendor.exists() and vendor.read_text().strip() == _INTEL:
            nodes.append(_DEVICES / node.name)
    return nodes


def _gpu_problems(gpus: Sequence[Path]) -> Iterator[Problem]:
    for node in gpus:
        if not node.exists():
            yield warning(
                f"the machine has an Intel GPU, and its {node} is not in this container",
                "start the container with --device /dev/dri",
            )
        elif not os.access(node, os.R_OK | os.W_OK):
            yield warning(
                f"this user may not open {node}, so no driver can use the Intel GPU",
                "sudo usermod -aG render $USER, then log in again",
            )
    libraries = _system_file("libze_intel_gpu.so.1"), _system_file("intel-opencl/libigdrcl.so")
    if gpus and not any(libraries):
        yield warning("the machine has an Intel GPU and no driver for computing", INSTALL_GPU)
