"""Import a package of this distribution by its bare name, or name the file that shadows it.

``allocator`` and ``transforms`` are names that others use too. A user's own transforms.py next to a
training script takes precedence over ours, and PyPI has a package of each name whose files would
replace ours. Either way, the wrong module would be imported silently.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from fusedoptim._version import REINSTALL, __version__

_ROOT = Path(__file__).resolve().parent.parent


def import_own(name: str) -> ModuleType:
    """Import our package ``name``, after checking that the name leads to our file.

    Raises:
        ImportError: the name leads to another file, or another package has overwritten our file.
    """
    path = own_file(name)
    module = importlib.import_module(name)
    marker = getattr(module, "__fusedoptim__", None)
    if marker != __version__:
        raise ImportError(overwritten(name, path, marker))
    return module


def own_file(name: str) -> Path:
    """The file that ``import name`` would run, if it is ours; nothing is imported.

    Raises:
        ImportError: the name leads to another file.
    """
    loaded = sys.modules.get(name)
    spec = loaded.__spec__ if loaded is not None else importlib.util.find_spec(name)
    origin = getattr(loaded, "__file__", None) or (spec.origin if spec is not None else None)
    expected = _ROOT / name / "__init__.py"
    if origin is None or Path(origin).resolve() != expected:
        # A folder without __init__.py has no origin.
        folders = list(spec.submodule_search_locations or []) if spec is not None else []
        raise ImportError(
            f"fusedoptim's package {name!r} is {expected}, but the name leads to "
            f"{origin or ', '.join(folders) or 'nothing'}; "
            "rename or move that, or put its folder later on sys.path"
        )
    return expected


def overwritten(name: str, path: Path, marker: str | None) -> str:
    """The error for a package that was installed over ours, as its ``marker`` shows."""
    return (
        f"{path} does not belong to fusedoptim {__version__} (its mark is {marker!r}): "
        f"another distribution named {name!r} was installed over it; uninstall that one, "
        f"then, in a clone of fusedoptim, {REINSTALL}"
    )
