"""Sizes and tables as text and HTML, for messages and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Row = Sequence[str]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: float) -> str:
    """A number of bytes with a unit, such as "1.5 KiB"."""
    unit = 0
    while abs(nbytes) >= 1024 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.1f}".removesuffix(".0") + f" {_UNITS[unit]}"


def as_text(header: Row, rows: Iterable[Row], align: Callable[[str, int], str]) -> str:
    """A table of plain text; ``align`` pads all columns but the first, as ``str.rjust`` does."""
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ([first.ljust(widths[0]), *map(align, rest, widths[1:])] for first, *rest in table)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def escaped(text: str) -> str:
    """``text`` with HTML's special characters escaped."""
    from html import escape  # not at import, which it would slow down

    return escape(text)


def as_html(header: Row, rows: Iterable[Row]) -> str:
    """A table as HTML."""
    head, *body = (
        "<tr>" + "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in [("th", header), *(("td", row) for row in rows)]
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
