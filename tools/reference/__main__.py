"""Writes docs/reference/, or compares it with the docstrings: ``python -m tools.reference``.

Both commands fail on a public name whose docstring is missing or incomplete.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.reference._inventory import read
from tools.reference._lacks import lacks
from tools.reference._pages import render

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"


def main() -> int:
    """Build or check, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.reference", description=__doc__)
    parser.add_argument("command", choices=("build", "check"))
    command = parser.parse_args().command
    pages = read(ROOT)
    missing = list(lacks(pages))
    for line in missing:
        print(line, file=sys.stderr)
    texts = render(pages)
    if command == "build":
        FOLDER.mkdir(exist_ok=True)
        for path in FOLDER.glob("*.md"):
            if path.name not in texts:
                path.unlink()
        for name, text in texts.items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return bool(missing)
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
    stale = sorted(
        name for name in texts.keys() | present.keys() if texts.get(name) != present.get(name)
    )
    for name in stale:
        print(f"docs/reference/{name} differs from the docstrings: make docs", file=sys.stderr)
    return bool(missing or stale)


if __name__ == "__main__":
    sys.exit(main())
