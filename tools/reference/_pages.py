"""Renders the pages of the reference as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import griffe

from tools.markdown import anchors
from tools.reference._inventory import (
    Page,
    base_names,
    is_made_by_us,
    members,
    own_bases,
    parameters,
)
from tools.reference._markup import to_markdown

_NOTE = "<!-- Built from the docstrings by `make docs`; change those, not this. -->"
_INDEX = """\
# API reference

Built from the docstrings. Import `allocator` and `transforms` as
`from fusedoptim import allocator, transforms`: other packages have the same top-level names.

"""
_LINE = 96
_Kind = griffe.DocstringSectionKind


def render(pages: list[Page]) -> dict[str, str]:
    """Return the text of each file of the reference, by file name.

    Args:
        pages: the pages to render.
    """
    pages = [page for page in pages if page.names]
    links = _Links(pages)
    texts = {_file(page): _Writer(page, links).text() for page in pages}
    index = [
        f"| [`{page.module.path}`]({_file(page)}) | {_summary(page.module, page, links)} |\n"
        for page in pages
    ]
    table = "| | |\n|---|---|\n" + "".join(index)
    return texts | {"README.md": f"{_NOTE}\n\n{_INDEX}{table}"}


def _file(page: Page) -> str:
    return f"{page.module.path}.md"


def _title(item: griffe.Object) -> str:
    """Return the heading of a name; a class and a function may differ only in case."""
    return f"class `{item.name}`" if item.is_class else f"`{item.name}`"


def _classes(page: Page) -> Iterator[griffe.Class]:
    for item in [*page.names.values(), *page.bases.values()]:
        if isinstance(item, griffe.Class):
            yield item


def _entries(page: Page) -> Iterator[griffe.Object]:
    """Yield what a page describes: classes, then other names, then private bases."""
    yield from (item for item in page.names.values() if item.is_class)
    yield from (item for item in page.names.values() if not item.is_class)
    yield from page.bases.values()


class _Links:
    """Links to the place in the reference that describes a name."""

    def __init__(self, pages: Iterable[Page]) -> None:
        self._places: dict[str, tuple[Page, str]] = {}
        for page in pages:
            titles: dict[str, str] = {}
            for item in _entries(page):
                titles[item.path] = _title(item)
                if isinstance(item, griffe.Class):
                    for member in members(item):
                        if member.is_function:
                            titles[member.path] = f"`{item.name}.{member.name}`"
            places = zip(titles, anchors(titles.values()))
            self._places |= {path: (page, anchor) for path, anchor in places}
            for name, item in page.names.items():  # also by its public path, with its members
                public = f"{page.module.path}.{name}"
                for path in titles:
                    if path == item.path or path.startswith(f"{item.path}."):
                        self._places[public + path[len(item.path) :]] = self._places[path]
            self._places[page.module.path] = (page, "")

    def address(self, name: str, origin: Page, scopes: Iterable[str]) -> str | None:
        """Return the link from page ``origin`` to ``name``, looked up in each of ``scopes``."""
        for path in [name, *(f"{scope}.{name}" for scope in scopes)]:
            if path in self._places:
                page, anchor = self._places[path]
                file = "" if page is origin else _file(page)
                return f"{file}#{anchor}" if anchor else file
        return None


def _markdown(text: str, item: griffe.Object, page: Page, links: _Links) -> str:
    """Convert an item's docstring; names in it are looked up from the item outwards."""
    scopes = [item.path]
    outer = item.parent
    while outer is not None:
        scopes.append(outer.path)
        outer = outer.parent
    scopes += [page.module.path, *(cls.path for cls in _classes(page))]
    return to_markdown(text, lambda name: links.address(name, page, scopes))


def _summary(item: griffe.Object, page: Page, links: _Links) -> str:
    """Return the first paragraph of a docstring, for a table."""
    if item.docstring is None:
        return ""
    first = item.docstring.value.strip().split("\n\n")[0]
    return " ".join(_markdown(first, item, page, links).split()).replace("|", "\\|")


class _Writer:
    """Writes one page."""

    def __init__(self, page: Page, links: _Links) -> None:
        self._page = page
        self._links = links

    def text(self) -> str:
        module = self._page.module
        return "\n\n".join([_NOTE, f"# {module.path}", *self._body(module)]) + "\n"

    def _body(self, module: griffe.Module) -> Iterator[str]:
        yield from self._docstring(module)
        yield self._contents()
        for item in _entries(self._page):
            yield f"## {_title(item)}"
            if not item.is_attribute:
                yield f"```python\n{self._signature(item)}\n```"
            yield from self._docstring(item)
            if isinstance(item, griffe.Class):
                yield from self._attributes(item)
                yield from self._inherited(item)
            file = item.relative_package_filepath
            yield f"Source: [{file}](../../{file})"
            if isinstance(item, griffe.Class):
                yield from self._methods(item)

    def _contents(self) -> str:
        rows = [
            f"| [`{item.name}`]({self._address(item.path)}) | "
            f"{_summary(item, self._page, self._links)} |"
            for item in _entries(self._page)
            if item.path not in {base.path for base in self._page.bases.values()}
        ]
        return "\n".join(["| | |", "|---|---|", *rows])

    def _address(self, path: str) -> str | None:
        return self._links.address(path, self._page, ())

    def _signature(self, item: griffe.Object) -> str:
        if item.path in {base.path for base in self._page.bases.values()}:
            return f"class {item.name}"  # not constructed by users
        return signature(item)

    def _inherited(self, cls: griffe.Class) -> Iterator[str]:
        for base in own_bases(cls):
            address = self._address(base.path)
            names = [m for m in members(base) if m.name not in cls.members]
            if address and names:
                links = ", ".join(map(self._member_link, names))
                yield f"From [`{base.name}`]({address}): {links}."

    def _member_link(self, member: griffe.Object) -> str:
        address = self._address(member.path)
        return f"[`{member.name}`]({address})" if address else f"`{member.name}`"

    def _attributes(self, cls: griffe.Class) -> Iterator[str]:
        values = [member for member in members(cls) if not member.is_function]
        if values:
            lines = [
                f"- `{value.name}`{self._type(value)}: {self._plain(value)}" for value in values
            ]
            yield "\n".join(["**Attributes**", "", *lines])

    def _methods(self, cls: griffe.Class) -> Iterator[str]:
        for method in members(cls):
            if isinstance(method, griffe.Function):
                yield f"### `{cls.name}.{method.name}`"
                yield f"```python\n{signature(method)}\n```"
                yield from self._docstring(method)

    def _type(self, value: griffe.Object) -> str:
        annotation = getattr(value, "annotation", None)
        return f" (`{annotation}`)" if annotation is not None else ""

    def _plain(self, value: griffe.Object) -> str:
        text = "\n\n".join(self._docstring(value))
        return text.replace("\n", "\n  ").replace("\n  \n", "\n\n")

    def _docstring(self, item: griffe.Object) -> Iterator[str]:
        if item.docstring is None:
            return
        if item.is_attribute:  # "bytes: ..." of an attribute is not a section
            yield self._markdown(item.docstring.value, item)
            return
        for section in item.docstring.parsed:
            yield from self._section(section, item)

    def _section(self, section: griffe.DocstringSection, item: griffe.Object) -> Iterator[str]:
        kind, value = section.kind, section.value
        if kind is _Kind.text:
            yield self._markdown(value, item)
        elif kind is _Kind.parameters:
            yield self._list(
                "Arguments", ((_starred(p.name, item), p.description) for p in value), item
            )
        elif kind is _Kind.attributes:
            yield self._list("Attributes", ((a.name, a.description) for a in value), item)
        elif kind is _Kind.raises:
            yield self._list("Raises", ((str(r.annotation), r.description) for r in value), item)
        elif kind in (_Kind.returns, _Kind.yields):
            text = " ".join(_whole(entry, item) for entry in value)
            yield f"**{kind.value.capitalize()}:** {self._markdown(text, item)}"
        elif kind is _Kind.admonition:
            yield f"**{section.title or value.kind.capitalize()}**"
            yield self._markdown(value.contents, item)
        elif kind is _Kind.examples:
            yield "**Examples**"
            yield self._markdown("\n\n".join(text for _, text in value), item)
        else:
            raise ValueError(f"{item.path}: sections of kind {kind.value} are not supported")

    def _list(self, title: str, rows: Iterable[tuple[str, str]], item: griffe.Object) -> str:
        lines = [
            f"- `{name}`: {' '.join(self._markdown(text, item).split())}" for name, text in rows
        ]
        return "\n".join([f"**{title}**", "", *lines])

    def _markdown(self, text: str, item: griffe.Object) -> str:
        return _markdown(text, item, self._page, self._links)


def _whole(entry: griffe.DocstringNamedElement, item: griffe.Object) -> str:
    """Return a Returns entry; griffe may have taken words before a colon for a type."""
    if str(entry.annotation) in ("None", str(getattr(item, "returns", None))):
        return entry.description
    return f"{entry.annotation}: {entry.description}"


def _starred(name: str, item: griffe.Object) -> str:
    parameter = parameters(item).get(name.lstrip("*"))
    return _stars(parameter) + name.lstrip("*") if parameter is not None else name


def _stars(parameter: griffe.Parameter) -> str:
    kinds = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
    return kinds.get(parameter.kind, "")  # type: ignore[arg-type]


def signature(item: griffe.Object) -> str:
    """Return the declaration of a function or class, on one line if it fits.

    Args:
        item: the function or class.
    """
    if isinstance(item, griffe.Class):
        bases = [name for name in base_names(item) if not name.split(".")[-1].startswith("_")]
        if is_made_by_us(item) or not parameters(item):
            return f"class {item.name}" + (f"({', '.join(bases)})" if bases else "")
        return _call(f"class {item.name}", list(parameters(item).values()), "")
    assert isinstance(item, griffe.Function)
    prefix = "".join(
        f"@{label}\n" for label in ("staticmethod", "classmethod") if label in item.labels
    )
    returns = f" -> {item.returns}" if item.returns is not None else ""
    return prefix + _call(f"def {item.name}", list(parameters(item).values()), returns)


def _call(head: str, taken: list[griffe.Parameter], returns: str) -> str:
    parts = list(_parts(taken))
    line = f"{head}({', '.join(parts)}){returns}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"{head}(", *(f"    {part}," for part in parts), f"){returns}"])


def _parts(taken: list[griffe.Parameter]) -> Iterator[str]:
    is_keyword_only = False
    for parameter in taken:
        kind = parameter.kind
        if kind is griffe.ParameterKind.var_positional:
            is_keyword_only = True
        elif kind is griffe.ParameterKind.keyword_only and not is_keyword_only:
            is_keyword_only = True
            yield "*"
        text = _stars(parameter) + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not _stars(parameter):
            default = re.sub(r"^'(.*)'$", r'"\1"', str(parameter.default))
            text += f" = {default}" if parameter.annotation is not None else f"={default}"
        yield text
