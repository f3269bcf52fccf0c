"""This package itself: its compiled kernels and its names."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusedoptim._facade import overwritten, own_file
from fusedoptim._version import REINSTALL, __version__
from fusedoptim.doctor._report import Problem, Section, error, warning
from fusedoptim.launch import cache, modules
from fusedoptim.launch.modules import ModuleError
from fusedoptim.launch.parts import CODE

_NAMES = ("allocator", "transforms")
_MARKER = re.compile(r"""^__fusedoptim__ = ["'](.*?)["']""", re.MULTILINE)
_CURE = f"{REINSTALL} in a clone (installed --editable: git checkout .)"


def check_kernels() -> Section:
    """Each shipped module against its hash in the manifest."""
    try:
        entries = modules._manifest.__wrapped__()  # the file may have changed since it was cached
    except ModuleError as failure:
        return Section("kernels", {}, [error(str(failure).rpartition(";")[0], _CURE)])
    manifest = json.loads(modules.MANIFEST.read_text())
    states = {name: _state(entry) for name, entry in entries.items()}
    facts: dict[str, Any] = {
        "folder": str(modules.FOLDER),
        "manifest": f"version {manifest['version']}",
        "compiled by": dict(manifest["tools"]),
        "as shipped": f"{list(states.values()).count('')} of {len(states)}",
        "cache of programs": str(cache.folder() or "none: FUSEDOPTIM_CACHE_DIR is empty"),
    }
    problems = [
        error(f"the compiled kernel {name} {state}", _CURE)
        for name, state in states.items()
        if state
    ]
    try:
        modules.check_code(CODE.read_bytes())
    except (OSError, ModuleError) as failure:
        problems.append(error(str(failure).rpartition(";")[0] or str(failure), _CURE))
    problems += _cache_problems(cache.folder())
    hashes = {name: entry["sha256"] for name, entry in entries.items()}
    return Section("kernels", facts, problems, {"sha256": hashes})


def _state(entry: dict[str, Any]) -> str:
    """What is wrong with a module's file, or ""."""
    try:
        spirv = (modules.FOLDER / entry["file"]).read_bytes()
    except OSError as failure:
        return f"cannot be read ({failure})"
    digest = hashlib.sha256(spirv).hexdigest()
    if digest == entry["sha256"]:
        return ""
    return f"is not the one that was shipped (sha256 {digest[:12]}..., not {entry['sha256'][:12]})"


def _cache_problems(folder: Path | None) -> Iterator[Problem]:
    """Why the cache cannot be used, which optimizers do not report."""
    if folder is None:
        return
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    reason = cache.danger_in(folder)
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        reason = "it cannot be written to"
    if reason:
        yield warning(
            f"compiled kernels cannot be kept in {folder}: {reason}, so each process compiles them",
            "set FUSEDOPTIM_CACHE_DIR to a folder that only you can write to",
        )


def check_names() -> Section:
    """Where imports of our packages' names lead, and other distributions with these names."""
    facts: dict[str, Any] = {"fusedoptim": str(Path(__file__).parents[1])}
    problems: list[Problem] = []
    for name in _NAMES:
        try:
            path = own_file(name)
            marker = _MARKER.search(path.read_text())
            if marker is None or marker[1] != __version__:
                raise ImportError(overwritten(name, path, marker and marker[1]))
            facts[name] = str(path.parent)
        except ImportError as failure:
            facts[name] = "not ours"
            message, _, cure = str(failure).partition("; ")
            problems.append(error(message, cure))
    return Section("packages", facts, [*problems, *_other_distributions()])


def _other_distributions() -> Iterator[Problem]:
    for name in _NAMES:
        for found in importlib.metadata.distributions(name=name):
            yield error(
                f"the distribution {name} {found.version}, which is not ours, is installed in the "
                f"folder {found.locate_file('')}; its files replace some of ours",
                f"pip uninstall {name}, then in a clone {REINSTALL}",
            )
    # A clone that was installed is found twice, by its own folder too.
    ours = {
        d.version: str(d.locate_file(""))
        for d in importlib.metadata.distributions(name="fusedoptim")
    }
    if len(ours) > 1:
        text = ", ".join(f"{version} in {folder}" for version, folder in ours.items())
        yield warning(
            f"several fusedoptim are installed: {text}",
            "pip uninstall fusedoptim until none is left, then install one",
        )
