"""The public names of the packages, and the page that describes each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import griffe

PACKAGES = ("allocator", "fusedoptim", "transforms")
# Modules of our own that users do not import: CONTRIBUTING.md describes them.
_NOT_AN_INTERFACE = ("fusedoptim.dtypes", "fusedoptim.kernels", "fusedoptim.optimizer")
_OPTIONS = {
    "warnings": False,  # our own check is more specific
    "returns_multiple_items": False,
    "returns_named_value": False,
}


class Page(NamedTuple):
    """A public module and the names that its page describes."""

    module: griffe.Module
    names: dict[str, griffe.Object]
    """Objects by public name, without names that an earlier page describes."""
    bases: dict[str, griffe.Class]
    """Private base classes with public members that classes of ``names`` inherit."""
    lost: list[str]
    """Names in ``__all__`` that nothing defines."""


def read(root: Path) -> list[Page]:
    """Return the pages for the packages under ``root``, packages before their modules.

    Args:
        root: the folder that contains the packages.
    """
    loader = griffe.GriffeLoader(
        search_paths=[root],
        allow_inspection=False,
        docstring_parser=griffe.Parser.google,
        docstring_options=_OPTIONS,  # type: ignore[arg-type]
    )
    packages = [resolved(loader.load(name, try_relative_path=False)) for name in PACKAGES]
    loader.resolve_aliases(implicit=False, external=False)
    modules = [module for package in packages for module in _public_modules(package)]
    described: set[str] = set()
    pages = []
    for module in sorted(modules, key=lambda module: (module.path.count("."), module.path)):
        page = _page(module, described)
        if page.names or page.lost or module.exports is None:
            pages.append(page)
            described |= {item.path for item in page.names.values()}
    return pages


def _public_modules(module: griffe.Object) -> Iterator[griffe.Module]:
    assert isinstance(module, griffe.Module)
    if module.path in _NOT_AN_INTERFACE:
        return
    if module.is_subpackage and module.exports is None:
        return  # a folder that does not say what is public is internal, and so are its modules
    yield module
    for name, child in module.modules.items():
        if not name.startswith("_") and not child.is_alias:
            yield from _public_modules(resolved(child))


def _page(module: griffe.Module, described: set[str]) -> Page:
    names: dict[str, griffe.Object] = {}
    lost = []
    for name in map(str, module.exports or ()):
        try:
            item = resolved(module.members[name])
        except (KeyError, griffe.AliasResolutionError):
            lost.append(name)
            continue
        if not item.is_module and item.path not in described:
            names[name] = item
    bases = {}
    shown = {item.path for item in names.values()}
    for item in names.values():
        for base in own_bases(item):
            if base.path not in shown | described and list(members(base)):
                bases[base.name] = base
    return Page(module, names, bases, lost)


def resolved(item: griffe.Object | griffe.Alias) -> griffe.Object:
    """Return the object that an imported name refers to."""
    return item.final_target if isinstance(item, griffe.Alias) else item


def own_bases(item: griffe.Object) -> list[griffe.Class]:
    """Return a class's base classes in these packages, nearest first."""
    return item.mro() if isinstance(item, griffe.Class) else []


def members(cls: griffe.Class) -> Iterator[griffe.Object]:
    """Yield the public attributes, properties and methods that the class itself defines."""
    for name, member in cls.members.items():
        is_public = not name.startswith("_") or name == "__call__"
        if is_public and not member.is_alias and not member.is_class:
            yield resolved(member)


def parameters(item: griffe.Object) -> dict[str, griffe.Parameter]:
    """Return the parameters, without ``self``, of a function or of a class that users construct."""
    function = item
    if isinstance(item, griffe.Class):
        if is_made_by_us(item):
            return {}
        makers = [cls for cls in (item, *own_bases(item)) if "__init__" in cls.members]
        if not makers:
            return {}
        function = resolved(makers[0].members["__init__"])
    if not isinstance(function, griffe.Function):
        return {}
    found = {parameter.name: parameter for parameter in function.parameters}
    is_bound = function.parent is not None and function.parent.is_class
    if is_bound and "staticmethod" not in function.labels:
        found.pop(next(iter(found)))
    return found


def is_made_by_us(cls: griffe.Class) -> bool:
    """Return whether users do not construct the class: errors, and classes that say "Made by"."""
    is_error = any(name.endswith(("Error", "Exception", "Warning")) for name in base_names(cls))
    text = cls.docstring.value if cls.docstring is not None else ""
    return is_error or re.search(r"^Made by :\w+:`", text, re.MULTILINE) is not None


def base_names(item: griffe.Object) -> list[str]:
    """Return the names of a class's bases as in its source."""
    return [str(base) for base in item.bases] if isinstance(item, griffe.Class) else []
