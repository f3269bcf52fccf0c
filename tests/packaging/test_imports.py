"""Imports are cheap and free of side effects, and a file that shadows a package is named."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tomllib

import fusedoptim
from fusedoptim._facade import import_own

ROOT = Path(__file__).parents[2]
PACKAGES = ("allocator", "fusedoptim", "transforms")


def run(script: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def test_imports_load_no_compiler_and_touch_no_device(tmp_path: Path) -> None:
    """Nor torch, but for ``transforms``. Submodules for users are attributes of ``fusedoptim``."""
    script = """
import sys
unwanted = {"numba", "numba_dpex", "dpnp", "dpctl", "llvmlite"}
import allocator
print(sorted((unwanted | {"torch"}) & set(sys.modules)))
import fusedoptim
print(sorted((unwanted | {"torch"}) & set(sys.modules)), {*sys.argv[1:]} <= {*dir(fusedoptim)})
import transforms
print(sorted(unwanted & set(sys.modules)))
bare = allocator
from fusedoptim import FusedSGD, transforms, allocator
print(allocator.queue is bare.queue)
print(all(getattr(fusedoptim, name).__name__ == f"fusedoptim.{name}" for name in sys.argv[1:]))
"""
    pages = (Path(__file__).parents[2] / "docs" / "reference").glob("fusedoptim.*.md")
    public = {page.name.split(".")[1] for page in pages} | {"allocator", "transforms"}
    done = run(script, tmp_path, *sorted(public))
    assert (done.stdout, done.stderr) == ("[]\n[] True\n[]\nTrue\nTrue\n", "")


@pytest.mark.parametrize("name", ["allocator", "transforms"])
def test_facade_exports_what_the_package_does(name: str) -> None:
    facade, package = importlib.import_module(f"fusedoptim.{name}"), importlib.import_module(name)
    assert facade.__all__ == package.__all__
    for exported in package.__all__:
        assert getattr(facade, exported) is getattr(package, exported)


@pytest.mark.parametrize(
    ("name", "before"), [("allocator", ""), ("transforms", "from fusedoptim import FusedSGD")]
)
def test_shadowed_by_a_users_file(name: str, before: str, tmp_path: Path) -> None:
    """Code that needs only the other packages still works."""
    shadow = tmp_path / f"{name}.py"
    shadow.write_text("raise SystemExit('foreign code ran')\n")
    done = run(f"{before}\nprint('works')\nimport fusedoptim.{name}", tmp_path)
    assert (done.returncode, done.stdout) == (1, "works\n")
    assert "ImportError" in done.stderr
    assert str(shadow) in done.stderr
    assert "rename or move that" in done.stderr


def test_shadowed_by_a_folder_without_init(tmp_path: Path) -> None:
    """From a wheel, our package is found; from an editable install, the error names the folder."""
    (tmp_path / "transforms").mkdir()
    done = run("from fusedoptim import transforms; print(transforms.optimize.__name__)", tmp_path)
    assert done.stdout == "optimize\n" or str(tmp_path / "transforms") in done.stderr


def test_overwritten_by_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("allocator"), "__fusedoptim__", "0.0.0")
    with pytest.raises(ImportError, match="another distribution named 'allocator'"):
        import_own("allocator")


def test_versions_agree() -> None:
    for name in ("allocator", "transforms"):
        assert importlib.import_module(name).__fusedoptim__ == fusedoptim.__version__
    assert importlib.metadata.version("fusedoptim") == fusedoptim.__version__


def test_every_package_is_listed_and_typed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for name in PACKAGES
        for path in (ROOT / name).rglob("__init__.py")
    }
    assert listed == found
    for name in PACKAGES:
        assert (ROOT / name / "py.typed").exists()


MOST_METHODS = 30
MOST_LINES = 500


@functools.cache
def modules(package: str) -> dict[str, tuple[Path, ast.Module]]:
    """The modules of a package, parsed, by their names."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path, ast.parse(path.read_text())
    return found


def imports(name: str, path: Path, tree: ast.Module, known: set[str]) -> set[str]:
    """The known modules that a module imports anywhere, even in functions or for type checkers."""
    found = set()
    folder = (name if path.name == "__init__.py" else name.rpartition(".")[0]).split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = folder[: len(folder) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            found |= {f"{base}.{alias.name}" for alias in node.names} & known or {base}
    return (found & known) - {name}


def cycles(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """The sets of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reachable = {name: reached(name) for name in graph}
    for name in graph:
        cycle = {other for other in reachable[name] if name in reachable[other]}
        if cycle and name == min(cycle):
            yield cycle


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_cycle_between_folders(package: str) -> None:
    found = modules(package)
    graph = {name: imports(name, *module, set(found)) for name, module in found.items()}
    for cycle in cycles(graph):
        assert len({found[name][0].parent for name in cycle}) == 1, sorted(cycle)


def test_cycles_are_found() -> None:
    graph = {"a.x": {"b.y"}, "b.y": {"c.z"}, "c.z": {"a.x"}, "d": {"a.x"}, "e": set()}
    assert list(cycles(graph)) == [{"a.x", "b.y", "c.z"}]


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks", "tests"])
def test_no_module_is_too_long(package: str) -> None:
    for name, (path, _) in modules(package).items():
        if name != "tests.tolerances":  # all tolerances are in one file
            assert len(path.read_text().splitlines()) <= MOST_LINES, name


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks", "tests"])
def test_no_class_is_too_large(package: str) -> None:
    for name, (_, tree) in modules(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                assert len(methods) <= MOST_METHODS, f"{name}.{node.name}"


def test_private_attributes_stay_in_their_module() -> None:
    """In the allocator, only the defining module and subclasses use a private attribute."""
    for name, (_, tree) in modules("allocator").items():
        attributes = [
            (node, ast.unparse(node.value))
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and re.match(r"_(?!_)", node.attr)
        ]
        own = {node.attr for node, value in attributes if value in ("self", "cls")}
        own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node, value in attributes:
            is_foreign = value.split(".")[0] in ("ctypes", "sys", "torch")
            assert is_foreign or node.attr in own, f"{name}:{node.lineno} {ast.unparse(node)}"
