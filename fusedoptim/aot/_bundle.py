"""The bundle's file: SPIR-V modules, device binaries and a manifest in one zip archive.

Entries are stored uncompressed, in a fixed order and with a fixed date. So the same modules make
the same bytes at any time and with any version of zlib.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

from fusedoptim._version import __version__
from fusedoptim.raw import InvalidModuleError, RawKernel, RawModule
from fusedoptim.raw._opencl_c import DRIVER_OPTIONS
from fusedoptim.raw._spirv import read_signatures

SUFFIX = ".fob"
ABI = 1
"""Version of the manifest's layout and of how raw kernels take their arguments."""
_FORMAT = "fusedoptim bundle"
_MANIFEST = "manifest.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest date in a zip archive
_CURE = "build it again: python -m fusedoptim aot build"


class BundleError(RuntimeError):
    """A file that is not a bundle, or a bundle that is truncated, altered or of another version."""


class Module(NamedTuple):
    """One module of a bundle, compiled from one source."""

    spirv: bytes
    kernels: dict[str, list[str]]
    """The parameters of each kernel, such as ``["const f32 *x", "u32 n"]``."""
    kind: str
    """The kind of the source: "OpenCL C", "SPIR-V" or "Python"."""
    source: str
    """The name of the source, without its folder."""
    source_sha256: str
    """SHA-256 of the source's file."""
    options: list[str]
    """The compiler's options."""
    tools: dict[str, str]
    """The versions of the tools that compiled it."""
    binaries: dict[str, bytes]
    """Machine code for GPUs, by ocloc's names of them."""
    ocloc: str
    """The version of ocloc; "" if there are no binaries."""

    @property
    def driver_options(self) -> tuple[str, ...]:
        """The options that the device's driver accepts too."""
        return tuple(option for option in self.options if option in DRIVER_OPTIONS)


def parameters(spirv: bytes) -> dict[str, list[str]]:
    """The parameters of each kernel, as the manifest has them."""
    return {name: list(map(str, taken)) for name, taken in read_signatures(spirv).items()}


def write(path: Path, modules: list[Module]) -> None:
    """Write a bundle, completely or not at all.

    As with ``open``, a link is followed, a file that exists keeps its permissions, and a new one
    has those of the umask.
    """
    files: dict[str, bytes] = {}
    entries = []
    for module in sorted(modules, key=lambda module: list(module.kernels)):
        name = next(iter(module.kernels))
        entry = module._asdict()
        entry["spirv"] = _added(files, f"{name}.spv", module.spirv)
        entry["binaries"] = {
            device: _added(files, f"{name}.{device.replace(':', '-')}.bin", binary)
            for device, binary in sorted(module.binaries.items())
        }
        entries.append(entry)
    manifest = {"format": _FORMAT, "abi": ABI, "fusedoptim": __version__, "modules": entries}
    files[_MANIFEST] = (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file, zipfile.ZipFile(file, "w") as archive:
            for name in sorted(files):
                archive.writestr(_zip_entry(name), files[name])
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # an interrupt may come after the replacement
            os.unlink(temporary)
        raise


def _added(files: dict[str, bytes], name: str, content: bytes) -> dict[str, str]:
    """Add a file, and return its entry in the manifest."""
    files[name] = content
    return {"file": name, "sha256": hashlib.sha256(content).hexdigest()}


def _zip_entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _EPOCH)
    entry.create_system = 3  # Unix; the default is the present system
    entry.external_attr = 0o644 << 16
    return entry


def read(path: Path) -> list[Module]:
    """Read the modules of a bundle, each compared with its SHA-256.

    Raises:
        BundleError: the file is not a bundle, is damaged, or of another version.
        OSError: it cannot be read; if there is none, FileNotFoundError.
    """
    content = path.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    except Exception as error:  # of any class, raised by decompressors for damaged bytes
        raise BundleError(
            f"{path} is not a bundle, or is truncated or damaged ({error}); {_CURE}"
        ) from error
    try:
        manifest = json.loads(files[_MANIFEST])
        is_bundle = manifest["format"] == _FORMAT
    except (KeyError, TypeError, ValueError, RecursionError):
        is_bundle = False
    if not is_bundle:
        raise BundleError(f"{path} is a zip archive without a bundle's {_MANIFEST}; {_CURE}")
    if manifest.get("abi") != ABI:
        raise BundleError(
            f"{path} has ABI {manifest.get('abi')!r}, made by fusedoptim "
            f"{manifest.get('fusedoptim')}, but fusedoptim {__version__} reads ABI {ABI}; {_CURE}"
        )
    try:
        return [_module(path, files, entry) for entry in manifest["modules"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"the {_MANIFEST} of {path} is damaged ({error!r}); {_CURE}") from error


def _module(path: Path, files: dict[str, bytes], entry: dict[str, Any]) -> Module:
    def content(described: dict[str, str]) -> bytes:
        name = described["file"]
        if name not in files:
            raise BundleError(f"{path} lacks {name}, which its manifest lists; {_CURE}")
        if hashlib.sha256(files[name]).hexdigest() != described["sha256"]:
            raise BundleError(
                f"{name} in {path} is not what was built: its SHA-256 differs; {_CURE}"
            )
        return files[name]

    binaries = {device: content(binary) for device, binary in entry["binaries"].items()}
    module = Module(**(entry | {"spirv": content(entry["spirv"]), "binaries": binaries}))
    for field, kind in get_type_hints(Module).items():
        if not isinstance(getattr(module, field), get_origin(kind) or kind):
            raise TypeError(f"{field} is {getattr(module, field)!r}")
    return module


class Bundle(Mapping[str, RawKernel]):
    """The kernels of a bundle, by name.

    Made by :func:`load`.
    """

    def __init__(self, path: Path, modules: list[Module], device: Any) -> None:
        self.path = path
        """Path of the file."""
        self.modules = modules
        """The modules in it."""
        self._kernels: dict[str, RawKernel] = {}
        for module in modules:
            raw = RawModule(module.spirv, module.driver_options, device=device)
            try:
                self._kernels |= {name: RawKernel(raw, name) for name in module.kernels}
            except (KeyError, InvalidModuleError) as error:
                raise BundleError(f"{path} is damaged ({error.args[0]}); {_CURE}") from error

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kernels."""
        return tuple(self._kernels)

    def __getitem__(self, name: str) -> RawKernel:
        try:
            return self._kernels[name]
        except KeyError:
            names = ", ".join(self._kernels)
            raise KeyError(f"{self.path} has no kernel {name!r}; available: {names}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __repr__(self) -> str:
        return f"<Bundle {self.path}: {', '.join(self._kernels)}>"


def load(path: str | os.PathLike[str], *, device: Any = "cpu") -> Bundle:
    """Load a bundle's kernels, which needs no compiler of Python or OpenCL C.

    Args:
        path: path of the file.
        device: where launches run if their arguments have no device, as for
            :class:`fusedoptim.raw.RawKernel`.

    Returns:
        a mapping from names to kernels, which the driver compiles at their first call or in
        :func:`warmup`.

    Raises:
        BundleError: the file is not a bundle, is truncated or altered, or has another ABI.
        OSError: it cannot be read; the error is that of ``open``: FileNotFoundError,
            IsADirectoryError, PermissionError.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from fusedoptim import aot
        >>> source = Path(tempfile.mkdtemp()) / "twice.cl"
        >>> code = "kernel void twice(global float *x) { x[get_global_id(0)] *= 2; }"
        >>> _ = source.write_text(code)
        >>> _ = aot.build([source], source.with_suffix(".fob"))
        >>> bundle = aot.load(source.with_suffix(".fob"))
        >>> bundle.names
        ('twice',)
        >>> x = torch.ones(3)
        >>> bundle["twice"](3, None, (x,))
        >>> x
        tensor([2., 2., 2.])
    """
    return Bundle(Path(path), read(Path(path)), device)
