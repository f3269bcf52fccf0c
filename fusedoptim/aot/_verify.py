"""Whether a bundle is intact, and runs here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from fusedoptim.aot._bundle import BundleError, Module, load, parameters
from fusedoptim.raw import InvalidModuleError, KernelCompileError


def verify(path: str | os.PathLike[str], *, device: Any = "cpu") -> list[str]:
    """Check a bundle, and return what is wrong with it; an empty list if nothing is.

    Compares each file in it with its SHA-256, and the kernels' parameters in the SPIR-V with the
    manifest's; builds each kernel on ``device``; and runs spirv-val on each module, if it is
    installed (apt install spirv-tools).

    Args:
        path: path of the bundle.
        device: the device that builds the kernels, as for :class:`fusedoptim.raw.RawKernel`.

    Raises:
        OSError: the file cannot be read; if there is none, FileNotFoundError.
        fusedoptim.allocator.DeviceNotFoundError: there is no such device.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from fusedoptim import aot
        >>> source = Path(tempfile.mkdtemp()) / "twice.cl"
        >>> code = "kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }"
        >>> _ = source.write_text(code)
        >>> _ = aot.build([source], source.with_suffix(".fob"))
        >>> aot.verify(source.with_suffix(".fob"))
        []
    """
    try:
        bundle = load(path, device=device)
    except BundleError as error:
        return [str(error)]
    problems = []
    for module in bundle.modules:
        problems += _check_signatures(module)
        problems += _check_with_spirv_val(module)
    for name, kernel in bundle.items():
        try:
            kernel.compile()
        except (KernelCompileError, InvalidModuleError) as error:
            problems.append(f"{name}: {error}")
    return problems


def _check_signatures(module: Module) -> list[str]:
    found = parameters(module.spirv)
    return [
        f"{name}: the SPIR-V has the parameters {found.get(name)}, and the manifest says "
        f"{module.kernels.get(name)}"
        for name in sorted(found.keys() | module.kernels.keys())
        if found.get(name) != module.kernels.get(name)
    ]


def _check_with_spirv_val(module: Module) -> list[str]:
    program = shutil.which("spirv-val")
    if program is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "module.spv")
        file.write_bytes(module.spirv)
        done = subprocess.run([program, str(file)], capture_output=True, text=True)
    if done.returncode == 0:
        return []
    return [f"{', '.join(module.kernels)}: spirv-val: {done.stdout}{done.stderr}".strip()]
