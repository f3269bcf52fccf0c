"""The instruction set that the CPU driver compiles for, and the variable FUSEDOPTIM_ISA.

The driver compiles SPIR-V for one target in the whole process. It reads the target's name from
``CL_CONFIG_CPU_TARGET_ARCH`` once, when the first context is made, and does not check it: for
another processor it emits instructions that this machine lacks. Therefore the requested level is
checked against the machine before the driver starts, and against the driver afterwards.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from allocator.runtime.maps import loaded_files

VARIABLE = "FUSEDOPTIM_ISA"
DRIVER_VARIABLE = "CL_CONFIG_CPU_TARGET_ARCH"
_BUILTINS = re.compile(r"clbltfn([a-z]\d)\.rtl")  # the driver's library of functions


class _Level(NamedTuple):
    target: str
    """the driver's name for it."""
    library: str
    """mark in the name of its library of built-in functions, as in clbltfnz0.rtl."""
    features: tuple[str, ...]
    """features beyond the previous level, by the names of /proc/cpuinfo."""


# Drivers 2024.18 and 2026.22 have these five libraries. Further targets (cascadelake,
# icelake-server; graniterapids, diamondrapids) use the library of avx512 or of avx512_fp16.
_LEVELS = {
    "sse4.2": _Level("corei7", "h8", ("sse4_2", "popcnt")),
    "avx": _Level("corei7-avx", "e9", ("avx",)),
    "avx2": _Level("core-avx2", "l9", ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm")),
    "avx512": _Level("skx", "z0", ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl")),
    "avx512_fp16": _Level(
        "sapphirerapids", "z1", ("avx512_fp16", "avx512_bf16", "avx512_vbmi2", "avx512_vnni")
    ),
}
ISA_LEVELS = tuple(_LEVELS)
"""Instruction set levels, each including the ones before it."""

_loaded: str | None = None


def processor_features() -> str:
    """The processor features that the system lets programs use; "" where they are not known.

    Example:
        >>> " sse4_2 " in processor_features()
        True
    """
    try:
        with Path("/proc/cpuinfo").open() as lines:
            return next(line for line in lines if line.startswith("flags"))
    except (OSError, StopIteration):
        return ""


@functools.cache
def highest_isa() -> str:
    """The highest of :data:`ISA_LEVELS` that the processor and the operating system support.

    Raises:
        RuntimeError: they support none of them: the CPU driver needs SSE4.2.

    Example:
        >>> highest_isa() in ISA_LEVELS
        True
    """
    has = processor_features().split()
    highest = None
    for name, level in _LEVELS.items():
        if not set(level.features).issubset(has):
            break
        highest = name
    if highest is None:
        raise RuntimeError("this processor lacks SSE4.2, which the CPU driver needs")
    return highest


def loaded_isa() -> str | None:
    """The level that the CPU driver compiles for in this process; None before it started.

    It is taken from the library of built-in functions that the driver has loaded, so it is the
    actual level, not the requested one.

    Example:
        >>> loaded_isa() in (None, *ISA_LEVELS)
        True
    """
    global _loaded
    if _loaded is None:
        names = map(os.path.basename, loaded_files())
        marks = {found[1] for name in names if (found := _BUILTINS.fullmatch(name))}
        _loaded = next((name for name in _LEVELS if _LEVELS[name].library in marks), None)
    return _loaded


def wanted_isa() -> str | None:
    """The level that FUSEDOPTIM_ISA names, or None.

    Raises ValueError for a level that this machine lacks or the driver's own variable contradicts.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    if wanted not in _LEVELS:
        raise ValueError(f"{VARIABLE}={wanted!r} is not one of {', '.join(ISA_LEVELS)}")
    highest = highest_isa()
    if ISA_LEVELS.index(wanted) > ISA_LEVELS.index(highest):
        raise ValueError(
            f"{VARIABLE}={wanted!r} is above this machine's highest level, {highest!r}: the "
            "kernels would stop at an illegal instruction; unset it, or name a lower one"
        )
    target = _LEVELS[wanted].target
    driver = os.environ.get(DRIVER_VARIABLE, target)
    if driver != target:
        raise ValueError(
            f"{VARIABLE}={wanted!r} means {DRIVER_VARIABLE}={target}, but that is set to "
            f"{driver!r}; unset one of the two"
        )
    return wanted


def driver_target(choose: bool) -> str | None:
    """The driver's name for the level of FUSEDOPTIM_ISA, else for the highest if ``choose``."""
    wanted = wanted_isa()
    if wanted is None and choose and processor_features():
        wanted = highest_isa()
    return None if wanted is None else _LEVELS[wanted].target


def check_isa(device: Any) -> None:
    """Raise unless the CPU driver, once started, compiles for the level of FUSEDOPTIM_ISA."""
    named = os.environ.get(VARIABLE)
    if not named or named == _loaded or not device.is_cpu:
        return
    wanted, loaded = wanted_isa(), loaded_isa()
    if loaded is None:
        raise RuntimeError(
            f"{VARIABLE}={wanted!r} has no meaning for the driver of {device.name}, which is not "
            "Intel's CPU driver; unset it, or pip install intel-opencl-rt"
        )
    if loaded != wanted:
        raise RuntimeError(
            f"{VARIABLE}={wanted!r} was set after the CPU driver had started at {loaded!r}, which "
            "lasts as long as the process; set it before Python starts"
        )
