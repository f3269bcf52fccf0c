"""Versions of the packages, of Python and of the system, and which of them do not fit together."""

from __future__ import annotations

import csv
import fnmatch
import importlib.metadata
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from fusedoptim._version import __version__
from fusedoptim.doctor._report import Problem, Section, error, warning

_ALWAYS = ("torch", "numpy", "dpctl", "intel-opencl-rt", "intel-sycl-rt", "intel-cmplr-lib-ur")
_IF_INSTALLED = (
    *("intel-cmplr-lib-rt", "tbb", "umf", "mkl", "dpnp", "numba-dpex", "numba"),
    "intel-extension-for-pytorch",
)
# Their libraries call one another by names that change from year to year.
_ONE_RELEASE = ("intel-sycl-rt", "intel-cmplr-lib-ur")
REINSTALL_RUNTIME = "pip install --force-reinstall dpctl intel-opencl-rt"


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_file(distribution: str, pattern: str) -> Path | None:
    """An existing file that pip installed with ``distribution``, or None."""
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    # importlib.metadata.files is slow for packages of thousands of files, such as intel-sycl-rt.
    for path, *_ in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        if fnmatch.fnmatchcase(path.rpartition("/")[2], pattern):
            file = Path(str(installed.locate_file(path)))
            if file.exists():
                return file.resolve()
    return None


def check() -> Section:
    """The versions, and those that our requirements or each other exclude."""
    facts = {
        "fusedoptim": __version__,
        **{name: version_of(name) for name in _ALWAYS},
        **{name: version for name in _IF_INSTALLED if (version := version_of(name))},
        "Python": platform.python_version(),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
    }
    return Section("versions", facts, [*_unmet(), *_mixed_releases(), *_missing_runtime()])


def _unmet() -> Iterator[Problem]:
    """Our requirements that the environment does not meet."""
    try:
        requirements = importlib.metadata.requires("fusedoptim") or []
    except importlib.metadata.PackageNotFoundError:
        yield warning(
            "fusedoptim is not installed, only found in a folder on sys.path, so its "
            "requirements are unknown",
            "pip install . (or --editable .) in the folder of the clone",
        )
        return
    for requirement in requirements:
        if ";" in requirement:  # of an extra
            continue
        name = re.split(r"[^\w.-]", requirement)[0]
        version = version_of(name)
        cure = f"pip install {requirement.replace(' ', '')!r}"
        if version is None:
            yield error(f"{name} is not installed", cure)
        elif not _meets(version, requirement):
            yield error(f"{name} is {version}, and fusedoptim requires {requirement}", cure)


def _meets(version: str, requirement: str) -> bool:
    """Whether a version meets "name>=1,<2"; our requirements have no other operators."""
    have = _release(version)
    return all(
        have >= _release(bound) if operator == ">=" else have < _release(bound)
        for operator, bound in re.findall(r"(>=|<)\s*([\w.]+)", requirement)
    )


def _release(version: str) -> list[int]:
    """The first four numbers of "2.13.0rc1" or "2.13.0+cpu": 2, 13, 0, 0."""
    numbers = re.split(r"[^\d.]", version)[0].split(".")
    return [*map(int, filter(None, numbers)), 0, 0, 0][:4]


def _mixed_releases() -> Iterator[Problem]:
    """Runtime packages of two releases, of which pip upgraded one."""
    found = {name: version for name in _ONE_RELEASE if (version := version_of(name))}
    if len({version.split(".")[0] for version in found.values()}) > 1:
        text = " and ".join(f"{name} {version}" for name, version in found.items())
        yield error(f"the SYCL runtime mixes two oneAPI releases: {text}", REINSTALL_RUNTIME)


def _missing_runtime() -> Iterator[Problem]:
    """A dpctl that needs another libsycl than the installed one."""
    interface = installed_file("dpctl", "libDPCTLSyclInterface.so*")
    if interface is None:
        return
    needed = sorted(set(re.findall(rb"libsycl\.so\.(\d+)", interface.read_bytes())))
    for major in map(bytes.decode, needed):
        if installed_file("intel-sycl-rt", f"libsycl.so.{major}"):
            continue
        other = installed_file("intel-sycl-rt", "libsycl.so.[0-9]*[0-9]")
        yield error(
            f"dpctl {version_of('dpctl')} needs libsycl.so.{major}, and intel-sycl-rt "
            f"{version_of('intel-sycl-rt') or 'is not installed'}"
            + (f" has {other.name}" if other else ""),
            REINSTALL_RUNTIME,
        )
