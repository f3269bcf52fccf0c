"""The messages that docs/troubleshooting.md explains are the code's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"


def texts(node: ast.AST) -> Iterator[str]:
    """The strings in some code, with a null character for each value in an f-string."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(
            part.value if isinstance(part, ast.Constant) else "\0" for part in node.values
        )
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def is_said(message: str, said: str) -> bool:
    """Whether one of the strings, separated by \\1, contains the message's parts in order."""
    parts = filter(None, re.split(r"\s*\.\.\.\s*", message))  # an empty one would match anywhere
    return re.search("[^\1]*".join(map(re.escape, parts)), said) is not None


def test_every_message_is_in_the_code() -> None:
    packages = ("allocator", "fusedoptim", "transforms")
    sources = [path for name in packages for path in (ROOT / name).rglob("*.py")]
    said = "\1".join(text for path in sources for text in texts(ast.parse(path.read_text())))
    tables = PAGE.read_text().partition("\n## ")[2].rpartition("\n## ")[0]
    messages = re.findall(r"^\| `(.*?)` \|", tables, re.MULTILINE)
    assert len(messages) > 40
    assert [message for message in messages if not is_said(message, said)] == []
    assert not is_said("this was ... never said", said)
