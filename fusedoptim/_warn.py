"""Warnings that name the user's own line."""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from types import FrameType

_PASSED_OVER = str(Path(__file__).parent), functools.__file__


def warn(message: str, category: type[Warning]) -> None:
    """Warn, with the line of the innermost caller outside of this package."""
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        level += 1
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
