"""OpenCL and Level Zero drivers, as files: which are registered, and which exist."""

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
INSTALL_CPU = "pip install --force-reinstall intel-opencl-rt"
INSTALL_GPU = (
    "install its driver (Debian and Ubuntu: apt install intel-opencl-icd libze1 libze-intel-gpu1)"
)
# Libraries of oneAPI that its setvars.sh puts in front of those that pip installed.
_RUNTIME = ("libsycl.so.*", "libur_loader.so.*", "libOpenCL.so.*", "libintelocl.so", "libtbb.so.*")


def check() -> Section:
    """The drivers that are registered, and Intel GPUs without one."""
    own_driver = installed_file("intel-opencl-rt", "libintelocl.so")
    listed = os.environ.get("OCL_ICD_FILENAMES")
    icds = {icd: icd.read_text().strip() for icd in sorted(_VENDORS.glob("*.icd"))}
    gpus = intel_gpus()
    loader = installed_file("intel-opencl-rt", "libOpenCL.so.1")
    files = {
        "OpenCL loader": loader or _system_file("libOpenCL.so.1"),
        "CPU driver": own_driver,
        "OpenCL C compiler": installed_file("intel-opencl-rt", "libcommon_clang.so"),
        "Level Zero loader": _system_file("libze_loader.so.1"),
        "Level Zero GPU driver": _system_file("libze_intel_gpu.so.1"),
    }
    facts: dict[str, Any] = {name: path and str(path) for name, path in files.items()}
    facts["OpenCL drivers of the system"] = {icd.name: library for icd, library in icds.items()}
    facts["Intel GPUs"] = [gpu.name for gpu in gpus]
    problems = [
        *_missing_drivers(own_driver, listed),
        *_broken_icds(icds),
        *_stale_libraries(os.environ.get("LD_LIBRARY_PATH", "")),
        *_gpu_problems(gpus),
    ]
    return Section("drivers", facts, problems)


def _system_file(pattern: str) -> Path | None:
    folders = [Path(f) for f in os.environ.get("LD_LIBRARY_PATH", "").split(":") if f]
    found = (path for folder in (*folders, *_SYSTEM_FOLDERS) for path in folder.glob(pattern))
    return next(found, None)


def _is_missing(library: str) -> bool:
    """Whether a library is given as a path that does not exist."""
    return os.path.isabs(library) and not os.path.exists(library)


def _missing_drivers(own_driver: Path | None, listed: str | None) -> Iterator[Problem]:
    if own_driver is None and not listed:
        yield error(
            "the CPU driver, libintelocl.so of intel-opencl-rt, is not installed", INSTALL_CPU
        )
    for name in filter(_is_missing, (listed or "").split(":")):
        yield error(
            f"OCL_ICD_FILENAMES names {name}, which does not exist; while it is set, the CPU "
            "driver that pip installed is not added",
            "unset OCL_ICD_FILENAMES",
        )


def _broken_icds(icds: dict[Path, str]) -> Iterator[Problem]:
    for icd, library in icds.items():
        if _is_missing(library):
            yield warning(
                f"{icd} registers {library}, which does not exist: its driver was removed "
                "incompletely",
                f"install that driver again, or delete {icd}",
            )


def _stale_libraries(search_path: str) -> Iterator[Problem]:
    """SYCL runtimes that the linker prefers to those that pip installed."""
    own = installed_file("intel-sycl-rt", "libsycl.so")
    for folder in map(Path, filter(None, search_path.split(":"))):
        names = sorted({path.name for pattern in _RUNTIME for path in folder.glob(pattern)})
        if names and not (own and folder.resolve() == own.parent):
            yield warning(
                f"LD_LIBRARY_PATH has {folder}, whose {', '.join(names[:3])} may be loaded "
                "instead of those that pip installed",
                "unset LD_LIBRARY_PATH, or work in a shell without oneAPI's setvars.sh",
            )


def intel_gpus() -> Sequence[Path]:
    """The render nodes of Intel GPUs for which the kernel has a driver."""
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
