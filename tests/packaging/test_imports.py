"""Importing is free, and a shadowed name is named."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
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


def run(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=cwd, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("statement", [f"import {name}" for name in PACKAGES])
def test_import_loads_no_compiler_and_touches_no_device(statement: str, tmp_path: Path) -> None:
    script = (
        f"{statement}\nimport sys\n"
        "print(sorted({'numba', 'numba_dpex', 'dpnp', 'dpctl', 'llvmlite'} & set(sys.modules)))"
    )
    done = run(script, tmp_path)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_allocator_and_transforms_do_not_import_torch(tmp_path: Path) -> None:
    done = run("import allocator, sys; print('torch' in sys.modules)", tmp_path)
    assert done.stdout == "False\n"


def test_from_fusedoptim_import_everything(tmp_path: Path) -> None:
    script = (
        "from fusedoptim import FusedSGD, transforms, allocator\n"
        "import allocator as bare\n"
        "print(allocator.queue is bare.queue)"
    )
    done = run(script, tmp_path)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize("name", ["allocator", "transforms"])
def test_facade_exports_what_the_package_does(name: str) -> None:
    facade, package = importlib.import_module(f"fusedoptim.{name}"), importlib.import_module(name)
    assert facade.__all__ == package.__all__
    for exported in package.__all__:
        assert getattr(facade, exported) is getattr(package, exported)


@pytest.mark.parametrize("name", ["allocator", "transforms"])
def test_shadowed_by_a_users_file(name: str, tmp_path: Path) -> None:
    shadow = tmp_path / f"{name}.py"
    shadow.write_text("raise SystemExit('foreign code ran')\n")
    done = run(f"import fusedoptim.{name}", tmp_path)
    assert done.returncode == 1
    assert "ImportError" in done.stderr
    assert str(shadow) in done.stderr
    assert "rename or move that" in done.stderr


def test_shadowed_by_a_folder_without_init(tmp_path: Path) -> None:
    """Installed from a wheel ours is found; of an editable install the folder is named."""
    (tmp_path / "transforms").mkdir()
    done = run("from fusedoptim import transforms; print(transforms.optimize.__name__)", tmp_path)
    assert done.stdout == "optimize\n" or str(tmp_path / "transforms") in done.stderr


def test_shadowed_transforms_does_not_break_the_optimizers(tmp_path: Path) -> None:
    (tmp_path / "transforms.py").write_text("raise SystemExit('foreign code ran')\n")
    done = run("from fusedoptim import FusedSGD; print(FusedSGD.__name__)", tmp_path)
    assert done.stdout == "FusedSGD\n"


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


REBUILT = ("allocator",)
"""Packages that keep the rules of the layout."""
MOST_METHODS = 30
MOST_LINES = 500


def modules(package: str) -> dict[str, Path]:
    """The modules of a package, by their names."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """The known modules that a module imports, wherever in it: in functions, for type checkers."""
    found = set()
    folder = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = folder.split(".")[: len(folder.split(".")) - node.level + 1]
            base = ".".join(
                [*(start if node.level else []), *([node.module] if node.module else [])]
            )
            inner = {f"{base}.{alias.name}" for alias in node.names} & known
            found |= inner or {base}
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
    done: set[str] = set()
    for name in graph:
        if name not in done and name in reachable[name]:
            cycle = {other for other in reachable[name] if name in reachable[other]}
            done |= cycle
            yield cycle


@pytest.mark.parametrize("package", REBUILT)
def test_no_import_cycle_between_folders(package: str) -> None:
    found = modules(package)
    graph = {name: imports(name, path, set(found)) for name, path in found.items()}
    for cycle in cycles(graph):
        assert len({found[name].parent for name in cycle}) == 1, sorted(cycle)


def test_cycles_are_found() -> None:
    graph = {"a.x": {"b.y"}, "b.y": {"c.z"}, "c.z": {"a.x"}, "d": {"a.x"}, "e": set()}
    assert list(cycles(graph)) == [{"a.x", "b.y", "c.z"}]


@pytest.mark.parametrize("package", REBUILT)
def test_no_class_and_no_module_is_too_large(package: str) -> None:
    for name, path in modules(package).items():
        source = path.read_text()
        assert len(source.splitlines()) <= MOST_LINES, name
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                assert len(methods) <= MOST_METHODS, f"{name}.{node.name}"


@pytest.mark.parametrize("package", REBUILT)
def test_private_attributes_stay_in_their_module(package: str) -> None:
    """An attribute with an underscore is used by the module that defines it, or by subclasses."""
    for name, path in modules(package).items():
        tree = ast.parse(path.read_text())
        attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        own = {node.attr for node in attributes if ast.unparse(node.value) in ("self", "cls")}
        own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in attributes:
            is_private = node.attr.startswith("_") and not node.attr.startswith("__")
            value = ast.unparse(node.value)
            if is_private and value not in ("self", "cls"):
                is_foreign = value.split(".")[0] in ("ctypes", "sys", "torch")
                assert is_foreign or node.attr in own, f"{name}:{node.lineno} {ast.unparse(node)}"
