"""Builds bundles from sources."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fusedoptim.aot._bundle import SUFFIX, Module, write
from fusedoptim.aot._devices import compile_for, ocloc_version, parse_devices
from fusedoptim.aot._sources import compile_source


class Compiled(NamedTuple):
    """One compilation of a module."""

    kernels: tuple[str, ...]
    """The names of the module's kernels."""
    target: str
    """"SPIR-V", or a GPU."""
    size: int
    """Bytes."""
    seconds: float
    """Time that it took."""


def build(
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    options: Sequence[str] = (),
    devices: str | Sequence[str] = (),
) -> list[Compiled]:
    """Compile kernels and write them to a bundle, which :func:`load` reads.

    Args:
        sources: each a ``.cl`` file of OpenCL C, a ``.spv`` file, or a Python function, as
            ``module.py:function`` or ``package.module:function`` (``[jit]``).
        output: the bundle to write, a ``.fob`` file. A link is followed, and a file that exists
            keeps its permissions.
        options: for the compiler of every source, as for :class:`fusedoptim.raw.RawKernel`.
        devices: Intel GPUs to compile for too, by ocloc's names: "skl,dg2,pvc". A name may be that
            of a family, "gen9", or a range, "dg1:acm-g10".

    Returns:
        the compilations, each with its size and time.

    Raises:
        TypeError: ``sources`` is a string or a path; or ``options`` is a string.
        ValueError: a source of an unknown kind, one kernel name in two sources, or options that a
            source does not accept.
        FileNotFoundError: a source or the folder of ``output`` does not exist.
        ImportError: a Python source or the compiler cannot be imported.
        fusedoptim.raw.KernelCompileError: a source does not compile.
        fusedoptim.raw.InvalidModuleError: a ``.spv`` file is not SPIR-V with kernels.
        DeviceError: ocloc is not installed, does not know a device, or fails to compile for it.

    The bundle is written only if everything compiled.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> source = Path(tempfile.mkdtemp()) / "twice.cl"
        >>> code = "kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }"
        >>> _ = source.write_text(code)
        >>> (compiled,) = build([source], source.with_suffix(".fob"))
        >>> compiled.kernels, compiled.target
        (('twice',), 'SPIR-V')
    """
    if isinstance(sources, (str, os.PathLike)):
        raise TypeError(f"sources={sources!r} is one source; pass a list, [{sources!r}]")
    sources = list(sources)
    if not isinstance(options, str):  # which compile_source() refuses
        options = list(options)
    path = Path(output)
    if path.suffix != SUFFIX:
        raise ValueError(f"output={str(path)!r} is not a {SUFFIX} file; give it this suffix")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"output={str(path)!r}: there is no folder {path.parent}")
    if not sources:
        raise ValueError("sources is empty: name a .cl or .spv file or a Python function")
    names = parse_devices(devices)
    compiled: list[Compiled] = []
    modules: list[Module] = []
    for source in sources:
        began = time.perf_counter()
        module = compile_source(source, options)
        compiled.append(_compiled(module, "SPIR-V", module.spirv, began))
        _check_names(module, modules)
        for name in names:
            began = time.perf_counter()
            module.binaries[name] = compile_for(name, module.spirv, module.driver_options)
            compiled.append(_compiled(module, name, module.binaries[name], began))
        modules.append(module._replace(ocloc=ocloc_version()) if names else module)
    write(path, modules)
    return compiled


def _compiled(module: Module, target: str, binary: bytes, began: float) -> Compiled:
    return Compiled(tuple(module.kernels), target, len(binary), time.perf_counter() - began)


def _check_names(module: Module, others: list[Module]) -> None:
    for other in others:
        for name in sorted(module.kernels.keys() & other.kernels.keys()):
            raise ValueError(
                f"both {other.source} and {module.source} have a kernel {name!r}; rename one, or "
                "make two bundles"
            )
