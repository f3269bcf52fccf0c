"""Executes the notebooks without a browser, and strips outputs from their files.

``python -m notebooks run`` executes them with small parameters, and fails if one raises, warns, or
draws a figure that suits only one theme; ``strip`` removes outputs, counts and an editor's
metadata; ``check`` fails if a file is not stripped. Each takes file names; the default is all.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat

HERE = Path(__file__).parent
EXECUTED = Path("out/notebooks")
SMALL = "FUSEDOPTIM_NOTEBOOK_SMALL"
CELL_SECONDS = 300  # a cell that takes longer is considered hung
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stripped(text: str) -> str:
    """The text of a notebook's file without outputs, counts and metadata, as it is committed.

    Raises:
        ValueError: the text is not a notebook.
    """
    try:
        notebook = nbformat.reads(text, as_version=4)
        notebook.metadata = nbformat.from_dict(_METADATA)
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.validate(notebook)
    except (ValueError, TypeError, AttributeError, nbformat.ValidationError) as error:
        raise ValueError(f"not a notebook of format 4: {error}") from error
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


def strip(path: Path) -> str | None:
    """Strip the file in place; return an error message or None."""
    try:
        path.write_text(stripped(path.read_text("utf-8")), "utf-8")
    except ValueError as error:
        return f"{path}: {error}"
    return None


def check(path: Path) -> str | None:
    """Return what is wrong with the file, or None."""
    text = path.read_text("utf-8")
    try:
        is_stripped = text == stripped(text)
    except ValueError as error:
        return f"{path}: {error}"
    cure = "has outputs, counts or metadata of a run: python -m notebooks strip"
    return None if is_stripped else f"{path}: {cure}"


def run(paths: Sequence[Path], *, small: bool, jobs: int) -> list[str]:
    """Execute the notebooks, each in a fresh kernel; return error messages.

    Executed notebooks are written to ``out/notebooks``, a failed one up to the failing cell.
    """
    EXECUTED.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, SMALL: "1" if small else ""}
    if jobs > 1:  # threads of concurrent notebooks would wait for each other
        environment.setdefault("OMP_NUM_THREADS", "1")
    with ThreadPoolExecutor(jobs) as executor:
        problems = executor.map(lambda path: _execute(path, environment), paths)
        return [problem for problem in problems if problem]


def _execute(path: Path, environment: dict[str, str]) -> str | None:
    """Execute one notebook; return an error message or None."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=CELL_SECONDS,
            resources={"metadata": {"path": str(path.parent)}},
            # Sockets in a private folder, which other users cannot open, instead of network ports.
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/socket"}}),
        )
        try:
            # An empty profile: a user's own may run code when IPython starts.
            client.execute(env={**environment, "IPYTHONDIR": folder})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            return f"{path}: {_COLOURS.sub('', str(error))}"
        finally:
            nbformat.write(notebook, EXECUTED / path.name)
    if warnings := _errors_printed(notebook):
        return f"{path}: a reader would see on stderr:\n{warnings}"
    if theme := _theme_required(notebook):
        return f"{path}: a figure asks JupyterLab for a {theme} background, whatever its theme"
    print(f"{path.name:<24}{time.perf_counter() - start:6.1f} s", flush=True)
    return None


def _errors_printed(notebook: Any) -> str:
    """Return what cells wrote to stderr, mostly warnings."""
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream" and output.name == "stderr"
    )


def _theme_required(notebook: Any) -> str | None:
    """Return the background, "light" or "dark", that the inline backend requests for a figure.

    It does so if a figure is transparent and all its tick labels are light, or all dark.
    """
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if theme := output.get("metadata", {}).get("needs_background"):
                return str(theme)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser("python -m notebooks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("run", "strip", "check"):
        of_command = commands.add_parser(command)
        of_command.add_argument("paths", nargs="*", type=Path, metavar="file")
        if command == "run":
            of_command.add_argument("--full", action="store_true", help="with the full parameters")
            of_command.add_argument("--jobs", type=int, default=1, help="notebooks at a time")
    given = parser.parse_args(arguments)
    paths = given.paths or sorted(HERE.glob("*.ipynb"))
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")
    if given.command == "run":
        if given.jobs < 1:
            parser.error(f"--jobs {given.jobs} is less than 1")
        problems = run(paths, small=not given.full, jobs=given.jobs)
    else:
        done = map(strip if given.command == "strip" else check, paths)
        problems = [problem for problem in done if problem]
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
