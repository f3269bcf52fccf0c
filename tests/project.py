"""What ``pyproject.toml`` says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

PROJECT: dict[str, Any] = tomllib.loads(
    Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
)
