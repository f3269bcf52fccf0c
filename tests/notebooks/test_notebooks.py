"""The committed notebooks, and the commands that execute and strip them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from matplotlib import rc_params_from_file
from matplotlib.colors import to_rgb

from notebooks.__main__ import HERE, check, main, strip, stripped

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in HERE.glob("*.ipynb"))


def write(path: Path, *cells: str) -> Path:
    """Write a stripped notebook of code cells."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path.write_text(stripped(nbformat.writes(notebook)), "utf-8")
    return path


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return write(tmp_path / "clean.ipynb", "1 + 1")


@pytest.mark.parametrize("name", NAMES)
class TestCommitted:
    def test_opens_with_what_the_reader_will_get(self, name: str) -> None:
        first = nbformat.read(HERE / f"{name}.ipynb", as_version=4).cells[0]
        assert first.cell_type == "markdown"
        assert first.source.startswith("# ")
        assert "ou will" in first.source

    def test_has_small_parameters(self, name: str) -> None:
        assert (HERE / f"{name}.ipynb").read_text("utf-8").count("FUSEDOPTIM_NOTEBOOK_SMALL") == 1


@pytest.mark.parametrize(
    "edit",
    [
        lambda notebook: notebook["cells"][0].update(execution_count=3),
        lambda notebook: notebook["cells"][0].update(
            outputs=[{"output_type": "stream", "name": "stdout", "text": "2"}]
        ),
        lambda notebook: notebook["cells"][0]["metadata"].update(collapsed=True),
        lambda notebook: notebook["metadata"]["language_info"].update(version="3.11.7"),
        lambda notebook: notebook["metadata"]["kernelspec"].update(name="my-own"),
    ],
    ids=["count", "output", "cell", "version", "kernel"],
)
def test_what_a_run_leaves_is_found_and_stripped(clean: Path, edit: object) -> None:
    committed = clean.read_text("utf-8")
    notebook = json.loads(committed)
    assert callable(edit)
    edit(notebook)
    clean.write_text(json.dumps(notebook, indent=1) + "\n", "utf-8")
    assert "python -m notebooks strip" in str(check(clean))
    assert main(["check", str(clean)]) == 1
    assert strip(clean) is None
    assert clean.read_text("utf-8") == committed
    assert main(["check", str(clean)]) == 0


def test_other_formatting_is_found(clean: Path) -> None:
    clean.write_text(json.dumps(json.loads(clean.read_text("utf-8"))), "utf-8")
    assert check(clean) is not None


@pytest.mark.parametrize("text", ["", "{}", "[]", "hello", '{"nbformat": 4, "cells": 3}'])
def test_what_is_no_notebook_stays_as_it_is(text: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.ipynb"
    path.write_text(text)
    assert "broken.ipynb: not a notebook" in str(check(path))
    assert "broken.ipynb: not a notebook" in str(strip(path))
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.ipynb"], "no such file: nothing.ipynb"),
        (["run", "--jobs", "0"], "--jobs 0 is less than 1"),
        ([], "required: command"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two colors."""
    linear = [
        sum(
            weight * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for weight, c in zip((0.2126, 0.7152, 0.0722), to_rgb(color))
        )
        for color in (one, other)
    ]
    return (max(linear) + 0.05) / (min(linear) + 0.05)


@pytest.mark.parametrize("page", ["white", "#111111"], ids=["light", "dark"])
def test_figures_are_readable_in_each_theme(page: str) -> None:
    """3 is WCAG's bound for graphics; #111111 is the background of JupyterLab's dark theme."""
    style = rc_params_from_file(HERE / "figures.mplstyle", use_default_template=False)
    colors = [c["color"] for c in style["axes.prop_cycle"]]
    colors += [value for key, value in style.items() if key.endswith(("labelcolor", "titlecolor"))]
    colors += [style[key] for key in ("text.color", "xtick.color", "ytick.color")]
    assert len(colors) == 11
    for color in colors:
        assert contrast(color, page) >= 3, color


def test_run(tmp_path: Path) -> None:
    """The command runs in its own process; failing notebooks are named, the others still run."""
    small = (
        "import os; print(os.environ['FUSEDOPTIM_NOTEBOOK_SMALL'], os.path.basename(os.getcwd()))"
    )
    write(tmp_path / "good.ipynb", small)
    write(tmp_path / "raises.ipynb", "print('before')", "1 / 0", "print('after')")
    write(tmp_path / "warns.ipynb", "import warnings; warnings.warn('look out')")
    draw = "import matplotlib.pyplot as plt\nplt.figure(facecolor='none').add_subplot();"
    write(tmp_path / "dark.ipynb", draw)
    names = ["good.ipynb", "raises.ipynb", "warns.ipynb", "dark.ipynb"]
    done = subprocess.run(
        [sys.executable, "-m", "notebooks", "run", "--jobs", "4", *names],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stdout.split()[0] == "good.ipynb"
    assert "raises.ipynb: An error occurred" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "warns.ipynb: a reader would see on stderr" in done.stderr
    assert "look out" in done.stderr
    assert "dark.ipynb: a figure asks JupyterLab for a light background" in done.stderr
    executed = {name: (tmp_path / "out/notebooks" / name).read_text("utf-8") for name in names}
    assert f"1 {tmp_path.name}" in executed["good.ipynb"]
    assert '"before\\n"' in executed["raises.ipynb"]
    assert '"after\\n"' not in executed["raises.ipynb"]
    assert check(tmp_path / "good.ipynb") is None  # the notebook itself is unchanged
