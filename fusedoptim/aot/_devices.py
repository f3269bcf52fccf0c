"""Machine code for Intel GPUs, compiled by ocloc, Intel's offline GPU compiler."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_INSTALL = "apt install intel-opencl-icd, and intel-ocloc where ocloc is a package of its own"
_NO_DOUBLE = "Double type is not supported"
_EMULATE = "IGC_EnableDPEmulation=1 in the environment emulates it, in the GPU's driver too"
# Not only names: 12.10.0 is a GPU's version, and 0x4905 is the id of a PCI device.
_NUMBER = re.compile(r"\d+\.\d+\.\d+|0x[0-9a-fA-F]+")
_ELF, _AR = b"\x7fELF", b"!<arch>\n"


class DeviceError(RuntimeError):
    """A GPU that ocloc does not know, or for which it cannot compile a module."""


def parse_devices(devices: str | Sequence[str]) -> tuple[str, ...]:
    """The names in "skl,dg2,pvc" or a sequence; ranges are allowed: "dg1:acm-g10", "dg1:", ":dg1".

    Raises:
        DeviceError: ocloc does not know one, or is not installed.
    """
    names = devices.split(",") if isinstance(devices, str) else devices
    names = tuple(dict.fromkeys(name.strip() for name in names))
    if not names:
        return ()
    known = known_devices()
    for name in names:
        ends = [end for end in name.split(":", 1) if end]
        if not ends or not all(end in known or _NUMBER.fullmatch(end) for end in ends):
            raise DeviceError(
                f"ocloc does not know the device {name!r}; it knows {', '.join(known)}, ranges of "
                "them such as dg1:acm-g10, versions such as 12.10.0 and PCI ids such as 0x4905"
            )
    return names


@functools.cache
def known_devices() -> tuple[str, ...]:
    """The names of GPUs and of families of them that ocloc lists."""
    text = _run("compile", "--help").stdout
    # There are two lists: present names and deprecated ones.
    lists = re.findall(r"<device_type> can be: ([^\n]*)", text)
    names = (name.strip() for listed in lists for name in listed.split(","))
    return tuple(dict.fromkeys(name for name in names if re.fullmatch(r"[\w.-]+", name)))


@functools.cache
def ocloc_version() -> str:
    """The version of the GPU driver to which ocloc belongs."""
    query = "OCL_DRIVER_VERSION"
    with tempfile.TemporaryDirectory() as folder:
        done = _run("query", query, folder=folder)  # writes a file of this name
        answer = Path(folder, query)
        if not answer.exists():
            raise DeviceError(f"ocloc reports no version:\n{done.stdout}{done.stderr}")
        return answer.read_text().strip(" \n\0")


def compile_for(device: str, spirv: bytes, options: Sequence[str]) -> bytes:
    """Compile a module to an ELF file or, for several devices, to an ar archive of them."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "module.spv"), Path(folder, "output")
        source.write_bytes(spirv)
        output.mkdir()
        arguments = ["-spirv_input", "-file", str(source), "-device", device]
        arguments += ["-out_dir", str(output), "-output", "module"]
        if options:
            arguments += ["-options", " ".join(options)]
        done = _run("compile", *arguments, folder=folder)
        files = [path.read_bytes() for path in output.rglob("*") if path.is_file()]
    binaries = [file for file in files if file.startswith((_ELF, _AR))]
    if done.returncode or len(binaries) != 1:
        lines = (line for line in (done.stdout + done.stderr).splitlines() if line.strip())
        log = "\n".join(dict.fromkeys(lines))  # ocloc repeats lines
        cure = f"\n{_EMULATE}" if _NO_DOUBLE in log else ""
        raise DeviceError(f"ocloc cannot compile the module for {device!r}:\n{log}{cure}")
    return binaries[0]


def _run(*arguments: str, folder: str | None = None) -> subprocess.CompletedProcess[str]:
    program = shutil.which("ocloc")
    if program is None:
        raise DeviceError(
            f"devices need ocloc, Intel's offline GPU compiler, which is not installed: {_INSTALL}"
        )
    return subprocess.run([program, *arguments], capture_output=True, text=True, cwd=folder)
