"""The disk cache of compiled kernels: raw ones' SPIR-V, and what the CPU driver makes of ours.

A file holds a line about itself, then the module. Its name is the hash of all that the module
depends on. It is written whole or not at all, and read only if it is what was written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from fusedoptim._version import __version__

LIMIT = 256 << 20
"""Bytes that the files may take; those that were used longest ago go first."""
_MAGIC = b"fusedoptim kernel 1 "
_SUFFIX = ".spvcache"


def folder() -> Path | None:
    """Where compiled kernels are kept, or None if nothing is.

    ``FUSEDOPTIM_CACHE_DIR`` names it; empty, it keeps nothing. Without it, that is
    ``XDG_CACHE_HOME/fusedoptim``, or ``~/.cache/fusedoptim``.
    """
    own = os.environ.get("FUSEDOPTIM_CACHE_DIR")
    if own is not None:
        return Path(own) if own else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "fusedoptim"


@functools.cache
def warn_of(place: Path, reason: str) -> None:
    """Warn once that nothing can be kept."""
    warnings.warn(
        f"compiled kernels cannot be kept in {place} ({reason}); set FUSEDOPTIM_CACHE_DIR to a "
        "folder that can be written to, or to nothing to keep none",
        RuntimeWarning,
        stacklevel=6,
    )


def cached(
    parts: tuple[str, ...],
    build: Callable[[], bytes],
    unkept: Callable[[Path, str], None] = warn_of,
) -> bytes:
    """What ``build`` makes, from the disk if it was made before.

    A damaged file is made again, with a warning; where nothing can be written it is made anew in
    each process.

    Args:
        parts: all that the result depends on, besides the version of this package.
        build: makes it.
        unkept: called with the folder and the reason where nothing can be written.
    """
    place = folder()
    if place is None:
        return build()
    path = place / _name(parts)
    module = _read(path)
    if module is None:
        module = build()
        try:
            _write(path, module)
        except OSError as error:
            unkept(place, str(error))
    return module


def forget(parts: tuple[str, ...]) -> None:
    """Have :func:`cached` make anew what it made of these parts."""
    place = folder()
    if place is not None:
        with contextlib.suppress(OSError):
            os.unlink(place / _name(parts))


def _name(parts: tuple[str, ...]) -> str:
    # Each part with its length, as ("ab", "c") is not ("a", "bc").
    text = "".join(f"{len(part)}:{part}" for part in (__version__, *parts))
    return hashlib.sha256(text.encode()).hexdigest() + _SUFFIX


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    head, _, module = content.partition(b"\n")
    if head != _head(module):
        warnings.warn(
            f"the cached kernel {path} is truncated or damaged, and is compiled again",
            RuntimeWarning,
            stacklevel=5,
        )
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used last, goes last
    return module


def _head(module: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(module).hexdigest().encode()


def _write(path: Path, module: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_head(module) + b"\n" + module)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # an interrupt may come after the exchange
            os.unlink(name)
        raise
    _drop_oldest(path.parent)


def _drop_oldest(place: Path) -> None:
    files = []
    for entry in os.scandir(place):
        if entry.name.endswith(_SUFFIX):
            with contextlib.suppress(FileNotFoundError):  # another process drops too
                stat = entry.stat()
                files.append((stat.st_mtime, stat.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, name in sorted(files):
        if total <= LIMIT:
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        total -= size
