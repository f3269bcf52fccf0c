"""Runs the notebooks without a browser, and keeps their files free of what a run leaves in them.

``python -m notebooks run`` executes them with small parameters and fails if one raises or warns;
``strip`` writes them as they are committed: without outputs, counts and an editor's metadata;
``check`` fails if one is not written so. Each takes names of files, and all notebooks if none.
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
CELL_SECONDS = 300  # a cell that runs for so long hangs
_COLOURS = re.compile("\x1b\\[[0-9;]*m")
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def stripped(text: str) -> str:
    """A notebook's file as it is committed.

    Raises:
        ValueError: the text is no notebook.
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
    """Write the file as it is committed; what went wrong."""
    try:
        path.write_text(stripped(path.read_text("utf-8")), "utf-8")
    except ValueError as error:
        return f"{path}: {error}"
    return None


def check(path: Path) -> str | None:
    """What is wrong with the file."""
    text = path.read_text("utf-8")
    try:
        is_stripped = text == stripped(text)
    except ValueError as error:
        return f"{path}: {error}"
    cure = "has outputs, counts or metadata of a run: python -m notebooks strip"
    return None if is_stripped else f"{path}: {cure}"


def run(paths: Sequence[Path], *, small: bool, jobs: int) -> list[str]:
    """Execute the notebooks, each in a fresh kernel; what went wrong.

    The executed ones are written to ``out/notebooks``, those that failed up to where they did.
    """
    EXECUTED.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, SMALL: "1" if small else ""}
    if jobs > 1:  # threads of notebooks that run side by side would wait for each other
        environment.setdefault("OMP_NUM_THREADS", "1")
    with ThreadPoolExecutor(jobs) as executor:
        problems = executor.map(lambda path: _execute(path, environment), paths)
        return [problem for problem in problems if problem]


def _execute(path: Path, environment: dict[str, str]) -> str | None:
    """Execute one notebook; what went wrong."""
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
            # Sockets in a folder of ours, where nobody else can open them, and not of the network.
            config=Config({"KernelManager": {"transport": "ipc", "ip": f"{folder}/socket"}}),
        )
        try:
            # A profile of nobody's, as a person's own may run code when IPython starts.
            client.execute(env={**environment, "IPYTHONDIR": folder})
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            return f"{path}: {_COLOURS.sub('', str(error))}"
        finally:
            nbformat.write(notebook, EXECUTED / path.name)
    if warnings := _errors_printed(notebook):
        return f"{path}: a reader would see on stderr:\n{warnings}"
    print(f"{path.name:<24}{time.perf_counter() - start:6.1f} s", flush=True)
    return None


def _errors_printed(notebook: Any) -> str:
    """What cells wrote to stderr: warnings, mostly."""
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream" and output.name == "stderr"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 if all is well."""
    parser = argparse.ArgumentParser("python -m notebooks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("run", "strip", "check"):
        of_command = commands.add_parser(command)
        of_command.add_argument("paths", nargs="*", type=Path, metavar="file")
        if command == "run":
            of_command.add_argument("--full", action="store_true", help="not with small parameters")
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
