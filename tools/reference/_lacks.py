"""Checks that public docstrings are complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import griffe

from tools.reference._inventory import (
    Page,
    base_names,
    is_made_by_us,
    members,
    own_bases,
    parameters,
)

# The names of the kernel language make sense only in a kernel; the module's docstring shows one.
_SHOWN_TOGETHER = ("fusedoptim.raw.language",)


def lacks(pages: Iterable[Page]) -> Iterator[str]:
    """Yield a line for each thing that is missing from the docstrings.

    Args:
        pages: the pages with all public names.
    """
    for page in pages:
        if page.module.docstring is None:
            yield f"{page.module.path} has no docstring"
        if page.module.exports is None:
            yield f"{page.module.path} is a public module, but has no __all__"
        for name in page.lost:
            yield f"{page.module.path}.{name} is in __all__, but no source defines it"
        for item in page.names.values():
            yield from _of(item, parameters(item))
            shown = ">>>" in _text(item) or page.module.path in _SHOWN_TOGETHER
            if _needs_example(item) and not shown:
                yield f"{_where(item)} has no Example"
        for item in page.bases.values():
            yield from _of(item, [])
        for item in [*page.names.values(), *page.bases.values()]:
            if isinstance(item, griffe.Class):
                for member in members(item):
                    yield from _of(
                        member, [] if _is_documented_above(member) else parameters(member)
                    )


def _of(item: griffe.Object, taken: Collection[str]) -> Iterator[str]:
    if item.docstring is None:
        yield f"{_where(item)} has no docstring"
        return
    described = _arguments(item.docstring)
    for name in taken:
        if name not in described and not _is_documented_field(item, name):
            yield f"{_where(item)}: Args lacks {name}"
    for name in described:
        if taken and name not in taken:
            yield f"{_where(item)}: Args has {name}, which is not a parameter"


def _where(item: griffe.Object) -> str:
    return f"{item.relative_package_filepath}:{item.lineno}: {item.path}"


def _text(item: griffe.Object) -> str:
    return item.docstring.value if item.docstring is not None else ""


def _arguments(docstring: griffe.Docstring) -> list[str]:
    return [
        parameter.name.lstrip("*")
        for section in docstring.parsed
        if section.kind is griffe.DocstringSectionKind.parameters
        for parameter in section.value
    ]


def _is_documented_field(item: griffe.Object, name: str) -> bool:
    """Return whether ``name`` is a dataclass field with a docstring of its own."""
    field = item.members.get(name) if "dataclass" in item.labels else None
    return field is not None and field.docstring is not None


def _is_documented_above(member: griffe.Object) -> bool:
    """Return whether ``member`` overrides a method whose docstring describes the parameters."""
    return member.parent is not None and any(
        member.name in base.members for base in own_bases(member.parent)
    )


def _needs_example(item: griffe.Object) -> bool:
    """Return whether users call it: functions, and classes except errors and passive records."""
    if isinstance(item, griffe.Class):
        passive = ("Exception", "Error", "Warning", "NamedTuple", "Protocol")
        is_passive = any(name.endswith(passive) for name in base_names(item))
        return not (is_passive or is_made_by_us(item))
    return isinstance(item, griffe.Function)
