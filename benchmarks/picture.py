"""Draws docs/iterations.svg, the README's picture, from ``results/iterations.csv``.

``python -m benchmarks.picture build`` writes the picture; ``check`` fails if it differs from the
figures. The SVG has no background, and mid-tone colors that are readable on light and dark pages.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

FIGURES = Path(__file__).with_name("results") / "iterations.csv"
PICTURE = Path(__file__).parents[1] / "docs" / "iterations.svg"

_TEXT = "#7d8590"
_PART = "#8ab8de"  # of fusedoptim
_COLOURS = {
    "fusedoptim": "#3b8fd0",
    "FusedAdamW alone": _PART,
    "transforms alone": _PART,
    "IPEX": "#9b7fd0",
}
_TORCH_COLOUR = "#e08b2c"
_LABELS, _PANEL, _BAR, _ROW, _TOP = 236, 176, 118, 22, 44  # widths, then heights, in pixels
_MODELS = ("GPT", "ResNet-50", "BERT")


def svg() -> str:
    """The picture: a panel for each model, a bar for each configuration."""
    with FIGURES.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    configurations = list(dict.fromkeys(row["configuration"] for row in rows))
    width = _LABELS + _PANEL * len(_MODELS)
    height = _TOP + _ROW * len(configurations) + 4
    labels = [
        _text(_LABELS - 10, _TOP + _ROW * i + 15, name, "end")
        for i, name in enumerate(configurations)
    ]
    panels = [
        element
        for i, model in enumerate(_MODELS)
        for element in _panel(_LABELS + _PANEL * i, [row for row in rows if row["model"] == model])
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13" '
        f'fill="{_TEXT}">'
    )
    title = "<title>Milliseconds of a training iteration with AdamW, less is better</title>"
    return "\n".join([head, title, *labels, *panels, "</svg>\n"])


def _panel(left: int, rows: list[dict[str, str]]) -> Iterator[str]:
    yield _text(left, 16, rows[0]["model"], weight="bold")
    yield _text(left, 33, f"batch {rows[0]['batch']}, ms")
    longest = max(float(row["iteration_ms"]) for row in rows)
    for i, row in enumerate(rows):
        top = _TOP + _ROW * i
        length = _BAR * float(row["iteration_ms"]) / longest
        colour = _COLOURS.get(row["configuration"].partition(",")[0], _TORCH_COLOUR)
        yield (
            f'<rect x="{left}" y="{top + 2}" width="{length:.1f}" height="{_ROW - 5}" rx="2" '
            f'fill="{colour}"/>'
        )
        yield _text(left + length + 6, top + 15, row["iteration_ms"])


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )


def main() -> int:
    """Build or check; the exit code says whether the picture matches its figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.picture", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=("build", "check"))
    if parser.parse_args().command == "build":
        PICTURE.write_text(svg(), encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != svg():
        cure = "python -m benchmarks.picture build"
        print(f"{PICTURE.name} differs from {FIGURES.name}: {cure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
