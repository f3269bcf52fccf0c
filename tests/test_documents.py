"""The documents are correct: code blocks run, links lead somewhere, commands and files exist.

The ``python`` blocks of a page run in order in one namespace, those fenced ``python jit`` only if
the kernel compiler is installed. The API reference has no blocks: its examples are docstrings'.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
import torch
from markdown_it import MarkdownIt
from markdown_it.token import Token

from benchmarks import picture, scale
from tools.markdown import anchors

ROOT = Path(__file__).parent.parent
HAS_COMPILER = importlib.util.find_spec("numba_dpex") is not None
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ["allocator", "fusedoptim", "transforms"]
FOLDERS = [*PACKAGES, "benchmarks", "docs", "examples", "notebooks", "tests", "tools"]


class Block(NamedTuple):
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
    for token in tokens(path):
        if token.type == "fence":
            yield Block(token.map[0] + 1, token.info.strip(), token.content)


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
    """Write files to a temporary folder, and restore what a page changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transforms.passes.channels_last._default", None)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("page", pages_with_code())
def test_code_runs(page: str) -> None:
    path = ROOT / page
    namespace = {"__name__": "__main__"}
    dtype = torch.get_default_dtype()
    try:
        for line, info, code in blocks(path):
            if info not in ("python", "python jit"):
                assert not info.startswith("python"), f"{page}:{line}: no such block: {info}"
                continue
            if info == "python jit" and not HAS_COMPILER:
                continue
            padding = "\n" * line  # so that tracebacks have the page's lines
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(padding + code, str(path), "exec"), namespace)
    finally:
        torch.set_default_dtype(dtype)


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


@pytest.mark.parametrize(
    "index", ["docs/README.md", "docs/design/README.md", "docs/benchmarks/README.md"]
)
def test_every_page_is_in_its_index(index: str) -> None:
    path = ROOT / index
    linked = {(path.parent / str(t.attrs["href"])).resolve() for t in inlines(path) if t.attrs}
    assert set(path.parent.glob("*.md")) - {path} <= linked


def test_pages_that_sources_name_exist() -> None:
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    named = {
        (name_of(path), page)
        for path in sources
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 5
    assert [(name, page) for name, page in sorted(named) if not (ROOT / page).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 140


def test_the_readme_says_that_no_gpu_was_used() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("| | x86 CPU | Intel GPU |\n|---|---|---|\n")[2].partition("\n\n")[0]
    assert table
    assert all(row.endswith("**never run** |") for row in table.splitlines())
    assert "Nothing here has ever run on an Intel GPU" in text


# Steps in the README's speed table: benchmark, workload, torch's contender and ours.
STEPS = {
    "step alone, BERT-base": (
        "clipping",
        "bert-base",
        "torch fused AdamW, unclipped",
        "FusedAdamW, unclipped",
    ),
    "clipping and step, BERT-base": (
        "clipping",
        "bert-base",
        "clip_grad_norm_, torch fused AdamW",
        "FusedAdamW(max_grad_norm=1)",
    ),
    "step alone, 10,000 tensors of 1,000 elements": (
        "adam",
        "10000x1000",
        "torch fused AdamW",
        "FusedAdamW",
    ),
}


def recorded(benchmark: str) -> list[dict[str, str]]:
    with (ROOT / f"benchmarks/results/{benchmark}.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["cpu"].startswith("AMD EPYC")]


def speed_section() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition("\n## Speed\n")[2].partition("\n## ")[0]


def speed_table() -> dict[str, list[str]]:
    """The rows of the README's speed table: torch's time, ours, and the ratio."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", speed_section(), re.M)
    return {name: figures for name, *figures in rows}


@pytest.mark.parametrize("name", STEPS)
def test_the_readme_has_recorded_times_of_steps(name: str) -> None:
    benchmark, workload, *contenders = STEPS[name]
    rows = [row for row in recorded(benchmark) if row["workload"] == workload]
    minima = [[float(r["min_us"]) for r in rows if r["contender"] == c] for c in contenders]
    times = speed_table()[name][:2]
    number, unit = times[0].split()
    scale, digits = {"ms": 1e-3, "us": 1}[unit], len(number.partition(".")[2])
    runs = [
        [*(f"{us * scale:.{digits}f} {unit}" for us in (theirs, ours)), f"{ours / theirs:.2f}"]
        for theirs, ours in zip(*minima)
    ]
    assert speed_table()[name] in runs


MODELS = ("GPT", "ResNet-50", "BERT")


def iterations(configuration: str) -> list[str]:
    """The recorded milliseconds of an iteration of each model."""
    rows = [row for row in recorded("iterations") if row["configuration"] == configuration]
    by_model = {row["model"]: row["iteration_ms"] for row in rows}
    return [by_model[model] for model in MODELS]


def ratios(ours: list[str], theirs: list[str]) -> list[str]:
    return [f"{float(a) / float(b):.2f}" for a, b in zip(ours, theirs)]


def test_the_readme_has_recorded_iterations() -> None:
    rows = {
        "bfloat16": f"{', '.join(MODELS)} iteration, bfloat16",
        "float32": "the same in float32",
    }
    for dtype, row in rows.items():
        theirs, ours = (iterations(f"{name}, {dtype}") for name in ("torch fused", "fusedoptim"))
        columns = (
            f"{', '.join(theirs)} ms",
            f"{', '.join(ours)} ms",
            ", ".join(ratios(ours, theirs)),
        )
        assert speed_table()[row] == list(columns)
    kept = "{}, {} and {} ms".format(*iterations("torch fused, bfloat16, memory kept"))
    assert f"torch takes {kept} in the first row" in speed_section()


def test_the_readme_has_recorded_inferences() -> None:
    models = ("ResNet-50", "ConvNeXt-tiny", "BERT-base")
    rows = [
        row for row in recorded("inference") if (row["batch"], row["dtype"]) == ("1", "float32")
    ]
    medians = {(row["configuration"], row["model"]): row["median_ms"] for row in rows}
    theirs, ours = (
        [medians[configuration, model] for model in models]
        for configuration in ("eager", "fusedoptim, sample input")
    )
    name = f"inference of one input, float32: {', '.join(models)}"
    times = [", ".join(f"{float(ms):.1f}" for ms in column) + " ms" for column in (theirs, ours)]
    assert speed_table()[name] == [*times, ", ".join(ratios(ours, theirs))]


def test_the_picture_shows_its_figures() -> None:
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.svg()


def design_pages() -> list[Path]:
    return [path for path in (ROOT / "docs/design").glob("*.md") if path.name != "README.md"]


@pytest.mark.parametrize("path", design_pages(), ids=name_of)
def test_a_design_page_has_its_parts_in_order(path: Path) -> None:
    parts = re.findall(
        r"^\*\*(Decided|Because|Refused|Where)\.\*\*", path.read_text(encoding="utf-8"), re.M
    )
    assert parts == ["Decided", "Because", "Refused", "Where"]


@functools.cache
def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").exists() or (base / "__main__.py").exists()


@pytest.mark.parametrize("path", paths(), ids=name_of)
def test_commands_and_files_exist(path: Path) -> None:
    """Commands in code spans and shell blocks exist, as do paths that start with our folders."""
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


def test_what_contributing_names_exists() -> None:
    """Files that CONTRIBUTING.md names exist, and its code spans use words of our sources."""
    found = inlines(ROOT / "CONTRIBUTING.md")
    spans = {token.content for token in found if token.type == "code_inline"}
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.*")]
    texts = [file.read_text() for file in files if file.suffix == ".py"]
    words = set(re.findall(r"\w+", "\n".join([*texts, *make_targets()])))
    missing = []
    for span in spans:
        if re.fullmatch(r"[\w./-]+\.(?:py|md|lock|toml)", span):
            if not any(file.match(span) for file in [*files, *ROOT.iterdir()]):
                missing.append(span)
        elif re.fullmatch(r"[A-Za-z_][\w.]*", span) and not set(span.split(".")) <= words:
            missing.append(span)
    assert not missing


def test_the_page_on_scale_has_the_tables_that_are_computed() -> None:
    assert scale.page() == scale.PAGE.read_text()
