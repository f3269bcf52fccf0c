"""The compiled kernels that the package ships: SPIR-V modules and the manifest about them.

``make kernels`` writes both (:mod:`fusedoptim.kernels.__main__`); a running optimizer only
reads. A module that is missing, altered or of another layout is refused before it is launched.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fusedoptim._version import REINSTALL
from fusedoptim.dtypes import VARIANTS
from fusedoptim.kernels.language import Role
from fusedoptim.launch.layout import Argument, Layout

FOLDER = Path(__file__).parent.parent / "spirv"
MANIFEST = FOLDER / "manifest.json"
MANIFEST_VERSION = 8  # of the manifest's layout and of the launch block's


class ModuleError(RuntimeError):
    """A compiled kernel that the package should have is missing, damaged or of another version."""


class Module(NamedTuple):
    """One compiled kernel, for one variant or for several that compile alike."""

    name: str
    """Name of the entry point, such as "sgd_momentum_f32"."""
    variant: str
    """The first of those that it serves, such as "bf16" or "split"."""
    arguments: tuple[Argument, ...]
    """Its arguments, in the order of the launch block's words."""
    sums: int
    """Number of values that each lane sums over each row."""
    is_serial: bool
    """Whether its groups have one work item."""
    spirv: bytes

    @property
    def layout(self) -> Layout:
        """Where its arguments lie in a launch block."""
        return Layout(self.arguments)

    @property
    def arithmetic(self) -> str:
        """The dtype of its arithmetic: "float32" or "float64"."""
        return VARIANTS[self.variant].arithmetic


_CURE = f"reinstall the package: {REINSTALL} in a clone"


@functools.cache
def load_module(kernel: str, variant: str) -> Module:
    """The module of a variant of ``kernel``, checked against the manifest.

    A kernel that touches no parameter, such as the ratio of two norms, has one module for all
    variants of one arithmetic.
    """
    name = _serving().get((kernel, variant))
    if name is None:
        raise ModuleError(f"{MANIFEST} has no kernel '{kernel}_{variant}'; {_CURE}")
    entry = _manifest()[name]
    path = FOLDER / entry["file"]
    try:
        spirv = path.read_bytes()
    except OSError as error:
        raise ModuleError(
            f"the compiled kernel {path} cannot be read ({error}); {_CURE}"
        ) from error
    if hashlib.sha256(spirv).hexdigest() != entry["sha256"]:
        raise ModuleError(f"the compiled kernel {path} is not the one that was shipped; {_CURE}")
    arguments = tuple(Argument(name, Role(role)) for name, role in entry["arguments"])
    return Module(name, entry["variants"][0], arguments, entry["sums"], entry["is_serial"], spirv)


def check_code(code: bytes) -> None:
    """Raise a ModuleError if this is not the machine code that the package was shipped with."""
    if hashlib.sha256(code).hexdigest() != _read_manifest()["code"]["sha256"]:
        raise ModuleError(f"the machine code next to {__file__} is not what was shipped; {_CURE}")


def kernel_function(kernel: str) -> Callable[..., Any]:
    """The plain Python function that a kernel was compiled from."""
    (source,) = {e["source"] for e in _manifest().values() if e["kernel"] == kernel}
    module = importlib.import_module(f"fusedoptim.kernels.{Path(source).stem}")
    function: Callable[..., Any] = getattr(module, kernel)
    return function


def shipped() -> list[tuple[str, str]]:
    """The kernel and the (first) variant of every module, in the order of the manifest."""
    return [(entry["kernel"], entry["variants"][0]) for entry in _manifest().values()]


def _serving() -> dict[tuple[str, str], str]:
    """The module's name for each kernel and variant."""
    entries = _manifest().items()
    return {(entry["kernel"], v): name for name, entry in entries for v in entry["variants"]}


@functools.cache
def _manifest() -> dict[str, Any]:
    modules: dict[str, Any] = _read_manifest()["modules"]
    return modules


def _read_manifest() -> dict[str, Any]:
    try:
        manifest = json.loads(MANIFEST.read_text())
    except (OSError, ValueError) as error:
        raise ModuleError(f"the manifest {MANIFEST} cannot be read ({error}); {_CURE}") from error
    version = manifest.get("version") if isinstance(manifest, dict) else None
    if version != MANIFEST_VERSION:
        raise ModuleError(
            f"the manifest {MANIFEST} has version {version!r}, but this fusedoptim reads version "
            f"{MANIFEST_VERSION}: files of two releases are mixed; {_CURE}"
        )
    return dict(manifest)
