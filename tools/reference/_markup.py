"""Converts Sphinx's markup of docstrings to the forge's Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable

_LITERAL = re.compile(r"``(.+?)``", re.DOTALL)
_MATHS = re.compile(r":math:`(.+?)`", re.DOTALL)
_ROLE = re.compile(r":(?:py:)?(?:class|func|meth|mod|attr|data|exc|obj):`~?([^`]+)`")
_MATHS_BLOCK = re.compile(r"^\.\. math::\n((?:(?:    .*)?\n)+)", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> (?:.+\n?)+(?:\n(?:>>> (?:.+\n?)+))*", re.MULTILINE)
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"::\n\n((?:    .*\n|\n)+)")


def to_markdown(text: str, link: Callable[[str], str | None]) -> str:
    """Convert the dedented text of a docstring to Markdown.

    Args:
        text: a docstring without sections such as Args.
        link: returns the address for the name in a role such as ``:class:``, or None.

    Example:
        >>> to_markdown("see :func:`zip` and ``x``", {"zip": "#zip"}.get)
        'see [`zip`](#zip) and `x`'
    """
    text = text.strip() + "\n"
    text = _MATHS_BLOCK.sub(_maths_block, text)
    text = _INDENTED.sub(lambda match: f":\n\n{_fence('text', match[1])}\n", text)
    text = _EXAMPLE.sub(lambda match: _fence("pycon", match[0]), text)
    pieces = _FENCED.split(text)  # prose and fenced blocks alternate
    pieces[::2] = [_inline(prose, link) for prose in pieces[::2]]
    return "".join(pieces).strip()


def _inline(text: str, link: Callable[[str], str | None]) -> str:
    def role(match: re.Match[str]) -> str:
        name = match[1]
        address = link(name)
        return f"[`{name}`]({address})" if address else f"`{name}`"

    text = _MATHS.sub(lambda match: f"$`{match[1]}`$", text)
    text = _ROLE.sub(role, text)
    return _LITERAL.sub(lambda match: f"`{match[1]}`", text)


def _maths_block(match: re.Match[str]) -> str:
    lines = [line.strip() for line in match[1].strip().splitlines()]
    body = "\n".join(["\\begin{aligned}", *lines, "\\end{aligned}"])
    return f"```math\n{body}\n```\n\n"


def _fence(language: str, text: str) -> str:
    lines = text.strip("\n").splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    body = "\n".join(line[margin:] for line in lines)
    return f"```{language}\n{body}\n```\n"
