"""The disk cache of compiled kernels: SPIR-V of raw kernels, the CPU driver's machine code of all.

A file holds a line about itself, then the module. Its name is the hash of all that the module
depends on. It is written whole or not at all. It is read only if its content is what was written,
by this user or by root, because what is read here is run. See docs/design/cached-programs.md.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fusedoptim._version import __version__
from fusedoptim._warn import warn

LIMIT = 256 << 20
"""Bytes that the files may take; the least recently used are deleted first."""
_MAGIC = b"fusedoptim kernel 1 "
_SUFFIX, _UNFINISHED = ".spvcache", ".tmp"
_ABANDONED = 3600  # seconds after which nobody is writing an unfinished file any more
_VARIABLE = "FUSEDOPTIM_CACHE_DIR"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class UnsafeError(OSError):
    """Another user may put files into the cache's folder, or the home folder is unknown."""


def folder() -> Path | None:
    """Where compiled kernels are cached; None if FUSEDOPTIM_CACHE_DIR is empty."""
    own = os.environ.get(_VARIABLE)
    if own is not None:
        return Path(os.path.expanduser(own)) if own else None
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "fusedoptim"


def is_named_by_user() -> bool:
    """Whether the user named the folder, which may then have other uses, as ``/tmp`` has."""
    return _VARIABLE in os.environ


@functools.cache
def warn_of(place: Path, reason: str) -> None:
    """Warn once that nothing can be cached."""
    warn(
        f"compiled kernels cannot be kept in {place} ({reason}); set FUSEDOPTIM_CACHE_DIR to a "
        "writable folder, or to an empty string to disable the cache",
        RuntimeWarning,
    )


def danger_in(place: Path) -> str | None:
    """Why a folder that exists is not used, or None."""
    try:
        with _opened_folder(place):
            return None
    except UnsafeError as error:
        return str(error)
    except OSError:
        return None


def cached(
    parts: tuple[str, ...],
    build: Callable[[], bytes],
    on_write_failure: Callable[[Path, str], None] = warn_of,
    rebuild: bool = False,
) -> bytes:
    """What ``build`` makes, from the disk if it was made before.

    A file that is damaged or that another user can write is replaced, with a warning. A folder that
    another user can write is not used, with a warning.

    Args:
        parts: all that the result depends on, besides the version of this package.
        build: makes it.
        on_write_failure: called with the folder and the reason where nothing can be written.
        rebuild: build even if the disk has it, and replace that.
    """
    place = folder()
    if place is None:
        return build()
    name = _name(parts)
    module, damage = (None, None) if rebuild else _read(place, name)
    if module is None:
        module = build()
        try:
            _write(place, name, module)
        except UnsafeError as error:
            warn_of(place, str(error))
        except OSError as error:
            on_write_failure(place, str(error))
        if damage is not None:  # warns when the file is replaced, as the warning may be an error
            text = f"the cached kernel {place / name} is {damage}, and is compiled again"
            warn(text, RuntimeWarning)
    return module


def _name(parts: tuple[str, ...]) -> str:
    # Each part with its length, as ("ab", "c") is not ("a", "bc").
    text = "".join(f"{len(part)}:{part}" for part in (__version__, *parts))
    return hashlib.sha256(text.encode()).hexdigest() + _SUFFIX


def _read(place: Path, name: str) -> tuple[bytes | None, str | None]:
    """The module in a file, or None; and what is wrong with a file that is not used, or None."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with _opened_folder(place) as inside, _opened(name, flags, inside) as descriptor:
            danger = _danger(os.fstat(descriptor))
            with open(descriptor, "rb", closefd=False) as file:
                content = b"" if danger else file.read()
            head, _, module = content.partition(b"\n")
            if head == _head(module):
                with contextlib.suppress(OSError):
                    os.utime(descriptor)  # used last, deleted last
                return module, None
    except OSError:
        return None, None
    return None, danger or "truncated or damaged"


def _head(module: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(module).hexdigest().encode()


def _write(place: Path, name: str, module: bytes) -> None:
    _check_home(place)
    _make(place)
    temporary = f"{name}.{secrets.token_hex(8)}{_UNFINISHED}"
    with _opened_folder(place) as inside:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with (
                _opened(temporary, flags, inside) as descriptor,
                open(descriptor, "wb", closefd=False) as file,
            ):
                file.write(_head(module) + b"\n" + module)
            os.replace(temporary, name, src_dir_fd=inside, dst_dir_fd=inside)
        except BaseException:
            with contextlib.suppress(OSError):  # an interrupt may come after the replacement
                os.unlink(temporary, dir_fd=inside)
            raise
        _drop_oldest(inside, LIMIT)


def _check_home(place: Path) -> None:
    """Raise if ``~`` stands for no folder: it would be one of this name in the current folder."""
    if str(place).startswith("~"):
        raise UnsafeError("the home folder is unknown")


def _make(place: Path) -> None:
    """Make the folder, and those above it that are missing, for this user only."""
    if not place.parent.exists():
        _make(place.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)


@contextlib.contextmanager
def _opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    """A descriptor of a file or folder; of a new file, for this user only."""
    descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _opened_folder(place: Path) -> Iterator[int]:
    """A descriptor of the folder, so that the folder checked is the folder used."""
    _check_home(place)
    with _opened(place, os.O_RDONLY | os.O_DIRECTORY) as inside:
        if not is_named_by_user():
            _make_private(place, inside)
        danger = _danger(os.lstat(place), os.fstat(inside))
        if danger:
            raise UnsafeError(f"it is {danger}")
        yield inside


def _make_private(place: Path, inside: int) -> None:
    """Stop other users from writing to our folder: earlier versions followed the umask."""
    found = os.fstat(inside)
    is_ours = found.st_uid == os.geteuid() and not place.is_symlink()
    if is_ours and found.st_mode & _WRITABLE_BY_OTHERS:
        with contextlib.suppress(OSError):
            os.fchmod(inside, stat.S_IRWXU)
            _drop_oldest(inside, 0)  # others may have replaced files


def _danger(*found: os.stat_result) -> str | None:
    """Why a user other than this one and root could put something there, or None."""
    user = os.geteuid()
    for one in found:
        if one.st_uid not in (0, user):
            return f"owned by user {one.st_uid}, and this process runs as user {user}"
        if one.st_mode & _WRITABLE_BY_OTHERS and not stat.S_ISLNK(one.st_mode):
            return f"writable by other users (mode {stat.S_IMODE(one.st_mode):04o}; chmod go-w)"
    return None


def _drop_oldest(inside: int, limit: int) -> None:
    """Delete the least recently used files, until the rest take no more than ``limit`` bytes.

    Files that a killed process left unfinished go as well.
    """
    files, dropped = [], []
    oldest = time.time() - _ABANDONED
    for entry in os.scandir(inside):
        if _SUFFIX in entry.name:
            with contextlib.suppress(FileNotFoundError):  # another process drops too
                found = entry.stat(follow_symlinks=False)
                if entry.name.endswith(_SUFFIX):
                    files.append((found.st_mtime, found.st_size, entry.name))
                elif entry.name.endswith(_UNFINISHED) and found.st_mtime < oldest:
                    dropped.append(entry.name)
    total = sum(size for _, size, _ in files)
    for _, size, name in sorted(files):
        if total <= limit:
            break
        dropped.append(name)
        total -= size
    for name in dropped:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=inside)
