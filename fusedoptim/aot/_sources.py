"""Sources of kernels: files of OpenCL C and SPIR-V, and Python functions."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusedoptim.aot._bundle import Module, parameters
from fusedoptim.raw import RawModule
from fusedoptim.raw._opencl_c import compile_opencl_c, compiler_version
from fusedoptim.raw._python import TOOLS
from fusedoptim.raw._sources import FILES, opencl_text

_KINDS = "a .cl or .spv file, module.py:function or package.module:function"


class _Source(NamedTuple):
    kind: str
    name: str
    content: bytes
    """Bytes of the file."""
    function: Callable[..., Any] | None = None
    """The function, if the source is Python."""


def compile_source(source: str | os.PathLike[str], options: Sequence[str]) -> Module:
    """Compile one source.

    Raises:
        ValueError: the source is of an unknown kind, or does not accept the options.
        FileNotFoundError: there is no such file.
        ImportError: the Python module or the compiler cannot be imported.
        fusedoptim.raw.KernelCompileError: the source does not compile.
        fusedoptim.raw.InvalidModuleError: the file is not SPIR-V with kernels.
    """
    found = _read(os.fspath(source))
    # Not RawModule's cached SPIR-V, which another version of the tools may have made.
    if found.kind == "OpenCL C":
        spirv = compile_opencl_c(opencl_text(found.name, found.content), options)
        tools = {"intel-opencl-rt": compiler_version()}
    elif found.function is not None:
        spirv = RawModule(found.function, options).spirv
        tools = {tool: importlib.metadata.version(tool) for tool in TOOLS}
    else:
        spirv = RawModule(found.content, options).spirv
        tools = {}
    return Module(
        spirv=spirv,
        kernels=parameters(spirv),
        kind=found.kind,
        source=found.name,
        source_sha256=hashlib.sha256(found.content).hexdigest(),
        options=list(options),
        tools=tools,
        binaries={},
        ocloc="",
    )


def _read(source: str) -> _Source:
    path = Path(source)
    if path.suffix in FILES:
        return _Source(FILES[path.suffix], path.name, path.read_bytes())
    module, colon, function = source.rpartition(":")
    is_file = module.endswith(".py")
    is_module = is_file or all(part.isidentifier() for part in module.split("."))
    if not (colon and function.isidentifier() and is_module):
        raise ValueError(f"source={source!r} is not {_KINDS}")
    imported = _module_of_file(Path(module)) if is_file else importlib.import_module(module)
    found = getattr(imported, function, None)
    if not callable(found):
        raise ValueError(f"source={source!r}: {module} has no function {function!r}")
    file = Path(str(imported.__file__))
    return _Source("Python", f"{file.name}:{function}", file.read_bytes(), found)


def _module_of_file(path: Path) -> Any:
    """Import a file. Like a script, it may import modules of its folder."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"{path} for fusedoptim.aot"  # not that of another module, which the file may import
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module  # where a dataclass looks for the types of its fields
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
        sys.path.pop(0)
    return module
