"""Makes glibc's malloc keep freed memory for the next allocation.

See docs/design/kept-memory.md.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fusedoptim._locks import new_lock
from fusedoptim._warn import warn

__all__ = ["keep_memory", "release_memory"]

_PARAMETERS = {
    "M_TRIM_THRESHOLD": -1,
    "M_MMAP_THRESHOLD": -3,
    "M_MMAP_MAX": -4,
    "M_ARENA_MAX": -8,
}
"""The numbers of malloc's parameters in malloc.h."""
_LARGEST_INT = 2**31 - 1
_NEVER = -1  # M_TRIM_THRESHOLD counts in size_t
# glibc's defaults, from malloc.c: both thresholds, the mapping threshold at the end of its
# adaptation, and the number of mappings.
_STATIC, _DYNAMIC_MAXIMUM, _MAPPINGS = 128 << 10, 32 << 20, 65536
_ARENAS_PER_CORE = 8  # NARENAS_FROM_NCORES in arena.c
_VARIABLES = {
    "mmap_threshold": "MALLOC_MMAP_THRESHOLD_",
    "trim_threshold": "MALLOC_TRIM_THRESHOLD_",
    "mmap_max": "MALLOC_MMAP_MAX_",
    "top_pad": "MALLOC_TOP_PAD_",
    "arena_max": "MALLOC_ARENA_MAX",
}
_NUMBER = re.compile(r"-?(0[xX][0-9a-fA-F]+|[1-9][0-9]*|0)")
_ENVIRONMENT = Path("/proc/self/environ")

_lock = new_lock()
_is_kept = False


class _Settings(NamedTuple):
    """Four of malloc's parameters: two sizes in bytes, a number of mappings, and of heaps."""

    mmap_threshold: int
    trim_threshold: int
    mmap_max: int
    arena_max: int


def keep_memory() -> bool:
    """Make malloc keep freed memory, so that training iterations do not map it again.

    glibc returns large blocks, such as activations and gradients, to the system as soon as they
    are freed. The next iteration then gets new pages, and the system clears each of them on first
    use. After this call freed memory stays with the process until :func:`release_memory`. Call it
    once, before the first iteration. It holds for the whole process and for children forked from
    it. Further calls change nothing.

    Threads that start afterwards share the main thread's heap. Threads that have allocated before
    keep their own heaps. Later threads may take these over, and glibc still returns their empty
    memory.

    Returns:
        whether memory is kept. False, with a warning, where another library serves malloc
        (jemalloc, tcmalloc, musl): it has settings of its own.

    Raises:
        RuntimeError: glibc refuses a setting.

    Example:
        >>> from fusedoptim import runtime
        >>> runtime.keep_memory()
        True
        >>> runtime.release_memory()
    """
    global _is_kept
    if (other := other_malloc()) is not None:
        warn(
            f"keep_memory() did nothing: {other} serves malloc in this process, not glibc; tune it "
            "by its own settings, or start Python without it",
            RuntimeWarning,
        )
        return False
    with _lock:
        _is_kept = True  # first: what an interrupt leaves half done, release_memory() undoes
        try:
            _set("M_TRIM_THRESHOLD", _NEVER)
            _set("M_MMAP_MAX", 0)
            _set("M_ARENA_MAX", 1)
        except RuntimeError:
            release_memory()
            raise
    return True


def release_memory() -> None:
    """Undo :func:`keep_memory`, and return what is free to the system.

    The values that environment variables (``MALLOC_MMAP_MAX_``, ``GLIBC_TUNABLES``, ...) gave
    malloc at the start are restored. Without any, glibc maps blocks from a certain size on, and
    raises that size to the size of freed blocks, up to 32 MiB. It stops adapting once a program
    sets a parameter, so the size is 32 MiB afterwards. If a thread was started while memory was
    kept, later threads share existing heaps. Does nothing if memory is not kept.

    Raises:
        RuntimeError: glibc refuses a setting.

    Example:
        >>> from fusedoptim import runtime
        >>> runtime.release_memory()
    """
    global _is_kept
    with _lock:
        if not _is_kept:
            return
        initial = _initial_settings(_initial_environment())
        _set("M_MMAP_THRESHOLD", initial.mmap_threshold)
        _set("M_TRIM_THRESHOLD", initial.trim_threshold)
        _set("M_MMAP_MAX", initial.mmap_max)
        _set("M_ARENA_MAX", initial.arena_max)
        _is_kept = False
    return_free_memory()


def return_free_memory() -> None:
    """Return malloc's free pages to the system, unless memory is kept.

    On its own, glibc returns only what lies at the end of the heap.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _is_kept:
        trim(ctypes.c_size_t(0))


def _set(name: str, value: int) -> None:
    """Set one of malloc's parameters; mallopt takes an int."""
    taken = value if value <= _LARGEST_INT else _NEVER
    if not ctypes.CDLL(None).mallopt(_PARAMETERS[name], taken):
        raise RuntimeError(f"glibc's mallopt refuses {name}={value}")


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def other_malloc() -> str | None:
    """The file of the library that serves malloc, or None if that is glibc."""
    process = ctypes.CDLL(None)
    # torch allocates with posix_memalign. The address of malloc itself may be that of a stub in
    # Python's executable.
    owner = _owner(process.posix_memalign)
    if hasattr(process, "gnu_get_libc_version") and owner == _owner(process.gnu_get_libc_version):
        return None
    return owner


def is_kept() -> bool:
    """Whether glibc keeps freed memory, by :func:`keep_memory` or by the initial variables."""
    if other_malloc() is not None:
        return False
    return _is_kept or _initial_settings(_initial_environment()).mmap_max == 0


def _owner(function: Any) -> str:
    """The file that defines a C function."""
    info = _SymbolInfo()
    ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    return os.fsdecode(info.file or b"an unknown library")


def _initial_environment() -> dict[str, str]:
    """The variables with which the process started: malloc does not see later changes."""
    variables: dict[str, str] = {}
    last = ""
    for entry in os.fsdecode(_ENVIRONMENT.read_bytes()).split("\0"):
        name, _, value = entry.partition("=")
        # Some versions of glibc end each tunable where it stands, in place of the colon.
        if last == "GLIBC_TUNABLES" and name.startswith("glibc."):
            variables[last] += f":{entry}"
        else:
            variables[name], last = value, name
    return variables


def _initial_settings(environment: Mapping[str, str]) -> _Settings:
    """The settings of a malloc that started with these variables, once it has adapted."""
    texts = {name: environment.get(variable, "") for name, variable in _VARIABLES.items()}
    for tunable in environment.get("GLIBC_TUNABLES", "").split(":"):  # they take precedence
        name, _, text = tunable.removeprefix("glibc.malloc.").partition("=")
        if name in texts:
            texts[name] = text
    given = {name: int(text, 0) for name, text in texts.items() if _NUMBER.fullmatch(text)}
    arenas = given.pop("arena_max", 0) or _ARENAS_PER_CORE * len(os.sched_getaffinity(0))
    if not given:
        return _Settings(_DYNAMIC_MAXIMUM, 2 * _DYNAMIC_MAXIMUM, _MAPPINGS, arenas)
    given.pop("top_pad", None)  # each of the four stops glibc from adapting the thresholds
    return _Settings(_STATIC, _STATIC, _MAPPINGS, arenas)._replace(**given)
