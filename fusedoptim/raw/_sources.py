"""The kinds of source of raw kernels, and their compilation."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fusedoptim.launch.cache import cached
from fusedoptim.raw._build import Program
from fusedoptim.raw._errors import class_of
from fusedoptim.raw._opencl_c import (
    DRIVER_OPTIONS,
    as_options,
    check_options,
    compile_opencl_c,
    compiler_version,
)
from fusedoptim.raw._python import compile_python, identity

Source = str | bytes | Path | Callable[..., Any]
FILES = {".cl": "OpenCL C", ".spv": "SPIR-V"}
"""The kinds of files that are sources, by suffix."""


class _Identified(NamedTuple):
    """A Python function; functions that compile to the same module are equal."""

    identity: bytes
    function: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identified) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)


def _compiled(kind: str, source: Any, options: tuple[str, ...]) -> Program:
    if kind == "SPIR-V":
        spirv = source
    elif kind == "Python":
        parts = ("Python", source.identity.hex())
        spirv = cached(parts, lambda: compile_python(source.function, options))
    elif _reads_files(source):  # which may change
        spirv = compile_opencl_c(source, options)
    else:
        parts = ("OpenCL C, each type known", compiler_version(), *options, source)
        spirv = cached(parts, lambda: compile_opencl_c(source, options))
    return Program(spirv, [option for option in options if option in DRIVER_OPTIONS])


_shared = functools.lru_cache(maxsize=256)(_compiled)
"""The program of a source, compiled once for all kernels of the same source."""


def compile_source(kind: str, source: Any, options: tuple[str, ...]) -> Program:
    """The program of a source that :func:`read_source` has read."""
    if kind == "Python":
        source = _Identified(identity(source), source)
    is_shared = kind != "OpenCL C" or not _reads_files(source)
    return (_shared if is_shared else _compiled)(kind, source, options)


def _reads_files(source: str) -> bool:
    return re.search(r"include|\b(import|embed)\b", source) is not None


def read_source(source: Any) -> tuple[str, Any]:
    """The kind of a source, and its text, bytes or function."""
    if isinstance(source, Path):
        kind = FILES.get(source.suffix)
        if kind is None:
            raise ValueError(f"source={source} is neither a .cl nor a .spv file")
        content = source.read_bytes()
        return kind, opencl_text(source.name, content) if kind == "OpenCL C" else content
    if isinstance(source, str):
        if "\n" not in source and "{" not in source and source.endswith((".cl", ".spv")):
            raise ValueError(
                f"source={source!r} is text, and looks like a file's name; "
                f"pass pathlib.Path({source!r})"
            )
        return "OpenCL C", source
    if isinstance(source, (bytes, bytearray, memoryview)):
        return "SPIR-V", bytes(source)
    if inspect.isroutine(source):
        return "Python", source
    raise TypeError(
        f"source is {class_of(source)}; pass OpenCL C text, SPIR-V bytes, a pathlib.Path or "
        "a Python function"
    )


def opencl_text(name: str, content: bytes) -> str:
    """OpenCL C from the bytes of the file ``name``; ValueError if it is in another encoding."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text ({error})") from error


def check_source_options(kind: str, options: Sequence[str]) -> tuple[str, ...]:
    """The options as a tuple; TypeError or ValueError if a source of this kind has none such."""
    if kind == "OpenCL C":
        return check_options(options)
    known = DRIVER_OPTIONS if kind == "SPIR-V" else ()
    options = as_options(options)
    for option in options:
        if option not in known:
            listed = ", ".join(known) or "none"
            raise ValueError(f"a kernel from {kind} has no option {option!r}; available: {listed}")
    return options
