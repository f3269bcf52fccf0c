"""The examples in docstrings run, in every module that has some.

One that says ``# [jit]`` needs the kernel compiler, as does a module that imports it.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # an error's message may be long
CHANGED = {"transforms.passes.channels_last": "_default"}  # what a module's examples change


def modules_with_examples() -> Iterator[str]:
    for package in ("allocator", "fusedoptim", "tools", "transforms"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>> " in path.read_text(encoding="utf-8"):
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def loaded(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        cause = error.__cause__ or error
        if HAS_COMPILER or getattr(cause, "name", None) not in ("numba", "numba_dpex", "llvmlite"):
            raise
        pytest.skip("needs the [jit] environment")


@pytest.mark.parametrize("name", list(modules_with_examples()))
def test_docstrings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = loaded(name)
    if name in CHANGED:
        monkeypatch.setattr(f"{name}.{CHANGED[name]}", None)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    assert found
    for test in found:
        if HAS_COMPILER or not any("# [jit]" in example.source for example in test.examples):
            runner.run(test)
    assert runner.summarize().failed == 0
