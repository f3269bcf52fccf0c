"""Rows of cells as a table, in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Row = Sequence[str]


def as_text(header: Row, rows: Iterable[Row], align: Callable[[str, int], str]) -> str:
    """Lines of columns, the first to the left, the others as ``str.ljust`` or ``str.rjust`` has it.

    Args:
        header: the names of the columns.
        rows: as long as it.
        align: pads a cell to a width.
    """
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table)]
    lines = ([first.ljust(widths[0]), *map(align, rest, widths[1:])] for first, *rest in table)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def escaped(text: str) -> str:
    """``text`` with its special characters as HTML has them."""
    from html import escape  # not above: every program's first step would wait 2 ms for it

    return escape(text)


def as_html(header: Row, rows: Iterable[Row]) -> str:
    """A table element."""
    head, *body = (
        "<tr>" + "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in [("th", header), *(("td", row) for row in rows)]
    )
    return f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
