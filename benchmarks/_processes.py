"""Running modules in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def run(module: str, *args: str) -> None:
    """Run a module that prints to this process's output; raise CalledProcessError if it fails."""
    subprocess.run(_command(module, args), cwd=_ROOT, check=True)


def output(module: str, *args: str) -> str:
    """Run a module and return what it prints."""
    process = subprocess.run(
        _command(module, args), cwd=_ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return process.stdout.strip()


def _command(module: str, args: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", module, *args]
