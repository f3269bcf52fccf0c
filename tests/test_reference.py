"""The API reference is built from complete docstrings."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tools.reference._inventory import PACKAGES, Page, read
from tools.reference._lacks import lacks
from tools.reference._markup import to_markdown
from tools.reference._pages import render

INITS = {
    "allocator": '"""Lowest."""\nfrom allocator._a import Box, fill\n__all__ = ["Box", "fill"]\n',
    "fusedoptim": '"""Middle."""\n__all__ = []\n',
    "transforms": '"""Highest."""\n__all__ = []\n',
}
DOCUMENTED = '''
class _Base:
    """What boxes share."""

    def close(self) -> None:
        """Close it, as :meth:`Box.open` says."""

class Box(_Base):
    r"""A box.

    .. math::
        a &= b \\\\
        c &= d

    Args:
        size: in bytes, :math:`n`.

    Example:
        >>> Box(3).open("x")

    Source: nowhere.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        """its ``size``."""

    def open(self, key: str = "k", *, force: bool = False) -> str:
        """Open it.

        Args:
            key: of it.
            force: do.

        Returns:
            the key: again.

        Raises:
            ValueError: no.
        """

    def __call__(self, lid: bool = True) -> None:
        """Use it.

        Args:
            lid: with it.
        """

def fill(box: "Box", *things: int, **names: str) -> None:
    """Fill a box.

    Args:
        box: a :class:`Box`.
        things: that go in.
        names: of things.

    Example:
        >>> fill(Box(3))
    """
'''


def pages(tmp_path: Path, source: str = DOCUMENTED, **inits: str) -> list[Page]:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(inits.get(package, INITS[package]))
    (tmp_path / "allocator" / "_a.py").write_text(source)
    return read(tmp_path)


def test_complete_docstrings_lack_nothing(tmp_path: Path) -> None:
    assert list(lacks(pages(tmp_path))) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('    """What boxes share."""\n', "", "_Base has no docstring"),
        (
            '        """Close it, as :meth:`Box.open` says."""',
            "        ...",
            "close has no docstring",
        ),
        ('        """its ``size``."""\n', "", "size has no docstring"),
        ("            force: do.\n", "", "open: Args lacks force"),
        ("            lid: with it.\n", "            led: it.\n", "__call__: Args lacks lid"),
        (
            "            force: do.\n",
            "            farce: do.\n",
            "open: Args has farce, which is not a parameter",
        ),
        ("        names: of things.\n", "", "fill: Args lacks names"),
        ("        size: in bytes", "        sise: in bytes", "Box: Args lacks size"),
        ("        >>> fill(Box(3))\n", "        none\n", "fill has no Example"),
        ("def fill(", "def full(", "allocator.fill is in __all__, but no source defines it"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert DOCUMENTED.count(old) == 1
    found = list(lacks(pages(tmp_path, DOCUMENTED.replace(old, new))))
    assert any(complaint in line for line in found), found


def test_a_public_module_without_a_list_is_named(tmp_path: Path) -> None:
    described = pages(tmp_path, fusedoptim='"""Middle."""\n')
    assert list(lacks(described)) == ["fusedoptim is a public module, but has no __all__"]
    assert "fusedoptim.md" not in render(described)


def test_a_folder_without_a_list_is_internal(tmp_path: Path) -> None:
    pages(tmp_path)
    folder = tmp_path / "fusedoptim" / "step"
    folder.mkdir()
    (folder / "__init__.py").write_text('"""Steps."""\n')
    (folder / "plan.py").write_text('"""Plans."""\n')
    assert list(lacks(read(tmp_path))) == []


def test_objects_that_only_we_make_need_no_arguments(tmp_path: Path) -> None:
    source = DOCUMENTED.replace("    Args:\n        size: in bytes, :math:`n`.", "    None.")
    made = source.replace("Source: nowhere.", "Made by :func:`fill`.")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert any("Args lacks size" in line for line in lacks(pages(tmp_path / "a", source)))
    described = pages(tmp_path / "b", made)
    assert list(lacks(described)) == []
    assert "class Box\n" in render(described)["allocator.md"]


def test_pages(tmp_path: Path) -> None:
    texts = render(pages(tmp_path))
    assert set(texts) == {"README.md", "allocator.md"}  # the others have no names
    expected = dedent(r"""
        ## class `Box`

        ```python
        class Box(size: int)
        ```

        A box.

        ```math
        \begin{aligned}
        a &= b \\
        c &= d
        \end{aligned}
        ```

        **Arguments**

        - `size`: in bytes, $`n`$.

        **Example**

        ```pycon
        >>> Box(3).open("x")
        ```

        Source: nowhere.

        **Attributes**

        - `size`: its `size`.

        From [`_Base`](#class-_base): [`close`](#_baseclose).

        Source: [allocator/_a.py](../../allocator/_a.py)

        ### `Box.open`

        ```python
        def open(key: str = "k", *, force: bool = False) -> str
        ```

        Open it.

        **Arguments**

        - `key`: of it.
        - `force`: do.

        **Returns:** the key: again.

        **Raises**

        - `ValueError`: no.

        ### `Box.__call__`

        ```python
        def __call__(lid: bool = True) -> None
        ```

        Use it.

        **Arguments**

        - `lid`: with it.

        ## `fill`
        """)
    assert expected in texts["allocator.md"]
    assert "Close it, as [`Box.open`](#boxopen) says." in texts["allocator.md"]
    assert "def fill(box: Box, *things: int, **names: str) -> None" in texts["allocator.md"]


def test_markup() -> None:
    text = "see ``a``::\n\n    x = ``y``\n\nand\n\n>>> 1\n1\n"
    expected = "see `a`:\n\n```text\nx = ``y``\n```\n\nand\n\n```pycon\n>>> 1\n1\n```"
    assert to_markdown(text, lambda name: None) == expected
