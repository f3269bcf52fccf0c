"""The sources' structure: packages, import cycles, lengths, and private attributes."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import PROJECT

ROOT = Path(__file__).parents[2]
PACKAGES = ("allocator", "fusedoptim", "transforms")


def test_every_package_is_listed_and_typed() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for name in PACKAGES
        for path in (ROOT / name).rglob("__init__.py")
    }
    data = {"fusedoptim.spirv"}  # setuptools warns of a folder with data that is not listed
    assert listed == found | data
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


@pytest.mark.parametrize("package", [*PACKAGES, "benchmarks", "tests"])
def test_named_tuples_have_no_other_base(package: str) -> None:
    """CPython 3.10, which the packages support, refuses another base, even ``Generic``."""
    for name, (_, tree) in modules(package).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and len(node.bases) > 1:
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                assert "NamedTuple" not in bases, f"{name}.{node.name}"


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
