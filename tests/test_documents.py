"""What the documents say holds: code blocks run, links lead somewhere, commands exist.

The ``python`` blocks of a page run in order in one namespace; those fenced ``python jit`` only
where the kernel compiler is installed. The API reference has none: its examples are docstrings'.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tools.markdown import anchors

ROOT = Path(__file__).parent.parent
HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None
REFERENCE = ROOT / "docs" / "reference"

# What a page's prose takes for given, by the heading of the first block that needs it.
SETUP = {
    ("README.md", "fusedoptim"): """
        import torch
        model = torch.nn.Linear(3, 1)
    """,
    ("README.md", "bfloat16 without loss"): """
        batch = torch.ones(2, 3)
    """,
    ("README.md", "Models optimized"): """
        images, labels = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
        criterion = torch.nn.CrossEntropyLoss()
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 2),
        )
    """,
    ("README.md", "The kernels"): """
        from fusedoptim.kernels.language import Computed, Index, Param, Scalar, Storage, fma
    """,
    ("docs/migrating-from-ipex.md", "Migrating from Intel Extension for PyTorch"): """
        import torch
        images = torch.randn(2, 3, 8, 8)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    """,
}


class Block(NamedTuple):
    heading: str
    line: int
    info: str
    code: str


def paths() -> list[Path]:
    folders = ("docs", "examples", "benchmarks", "notebooks", "tests")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.md")]
    return sorted([*ROOT.glob("*.md"), *found])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def tokens(path: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))


def plain(inline: Token) -> str:
    return "".join(child.content for child in inline.children or ())


def headings(path: Path) -> list[str]:
    stream = tokens(path)
    return [plain(b) for a, b in itertools.pairwise(stream) if a.type == "heading_open"]


def blocks(path: Path) -> Iterator[Block]:
    heading = ""
    stream = tokens(path)
    for before, token in zip([None, *stream], stream):
        if before is not None and before.type == "heading_open":
            heading = plain(token)
        if token.type == "fence":
            yield Block(heading, token.map[0] + 1, token.info.strip(), token.content)


def inlines(path: Path) -> Iterator[Token]:
    for token in tokens(path):
        yield from token.children or ()


def pages_with_code() -> list[str]:
    return [
        name_of(path)
        for path in paths()
        if REFERENCE not in path.parents and any(b.info.startswith("python") for b in blocks(path))
    ]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files go to a folder of the test's, and what a page sets is set back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transforms.passes.channels_last._default", None)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", pages_with_code())
def test_code_runs(page: str) -> None:
    path = ROOT / page
    namespace = {"__name__": "__main__"}
    prepared = set()
    dtype = torch.get_default_dtype()
    try:
        for heading, line, info, code in blocks(path):
            if info not in ("python", "python jit"):
                assert not info.startswith("python"), f"{page}:{line}: no such block: {info}"
                continue
            if info == "python jit" and not HAS_COMPILER:
                continue
            if heading not in prepared:
                prepared.add(heading)
                exec(textwrap.dedent(SETUP.get((page, heading), "")), namespace)
            padding = "\n" * line  # so that tracebacks have the page's lines
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(padding + code, str(path), "exec"), namespace)
    finally:
        torch.set_default_dtype(dtype)


def test_setups_are_for_headings_with_code() -> None:
    present = {(page, block.heading) for page in pages_with_code() for block in blocks(ROOT / page)}
    assert SETUP.keys() <= present


@pytest.mark.parametrize("path", paths(), ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for token in inlines(path):
        target = token.attrs.get("href") or token.attrs.get("src")
        if target is None or urlsplit(str(target)).scheme:
            continue
        file, _, anchor = unquote(str(target)).partition("#")
        goal = (path.parent / file).resolve() if file else path
        if not goal.is_relative_to(ROOT) or not goal.exists():
            broken.append(f"{target}: no such file")
        elif anchor and anchor not in anchors(headings(goal)):
            broken.append(f"{target}: no such heading")
    assert not broken


@pytest.mark.parametrize("index", ["docs/README.md", "docs/design/README.md"])
def test_every_page_is_in_its_index(index: str) -> None:
    path = ROOT / index
    linked = {(path.parent / str(t.attrs["href"])).resolve() for t in inlines(path) if t.attrs}
    assert set(path.parent.glob("*.md")) - {path} <= linked


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").exists() or (base / "__main__.py").exists()


@pytest.mark.parametrize("path", paths(), ids=name_of)
def test_commands_and_files_exist(path: Path) -> None:
    """Those of code spans and of shell blocks, a file being one with a folder of ours."""
    codes = [token.content for token in inlines(path) if token.type == "code_inline"]
    codes += [block.code for block in blocks(path) if block.info in ("sh", "bash", "console")]
    text = "\n".join(codes)
    own = "|".join(folder.name for folder in ROOT.iterdir() if (folder / "__init__.py").exists())
    commands = re.findall(r"(?:^|[;&$] *|[A-Z]=\S* )make ([a-z][\w-]*)", text, re.MULTILINE)
    modules = re.findall(rf"python3? -m ((?:{own})[\w.]*)", text)
    files = re.findall(rf"^(?:{own}|docs|examples|notebooks)/[\w./-]+\.\w+$", text, re.MULTILINE)
    missing = [f"make {name}" for name in commands if name not in make_targets()]
    missing += [f"python -m {name}" for name in modules if not is_module(name)]
    missing += [name for name in files if not (ROOT / name).exists()]
    assert not missing
