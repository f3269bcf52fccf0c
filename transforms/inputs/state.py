"""Restores what a model's forward changes in the model during calls with samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

_TORCHS = frozenset(vars(nn.Module()))
_OURS = "_fusedoptim"
_CONTAINERS = (list, dict, set)
_SIMPLE = (type(None), bool, int, float, complex, str, bytes, tuple, Tensor, *_CONTAINERS)
"""The types of attributes that are restored."""


@contextlib.contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Restore ``model`` at the end of the block.

    Buffers, hooks, and attributes of modules that are numbers, text, tensors, lists, dicts or sets
    are restored, with everything inside them. Parameters and objects of other classes are not.
    """
    before = _State(model)
    try:
        yield
    finally:
        before.put_back()


class _State:
    def __init__(self, model: nn.Module) -> None:
        self._bound: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The attributes of modules, and copies of them."""
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        """Each module's hooks by their ids, and copies. A transformers model registers some."""
        for module in model.modules():
            if isinstance(module, LazyModuleMixin):  # its first call makes another module of it
                continue
            for buffer in module._buffers.values():
                self._keep(buffer)
            if isinstance(module, torch.jit.ScriptModule):
                continue
            hooks = [value for name, value in vars(module).items() if "_hooks" in name]
            self._hooks += [(each, each.copy()) for each in hooks if isinstance(each, dict)]
            own = _simple(vars(module))
            self._bound += [(vars(module), own), (module._buffers, dict(module._buffers))]
            for value in own.values():
                self._keep(value)

    def _keep(self, value: Any) -> None:
        """Remember the contents of a value, and of all that is in it."""
        if type(value) is Tensor:
            if value.layout is torch.strided and not value.is_meta:
                self._tensors.setdefault(id(value), (value, value.detach().clone()))
        elif type(value) in _CONTAINERS and id(value) not in self._containers:
            self._containers[id(value)] = value, value.copy()
            for each in _items(value):
                self._keep(each)
        elif type(value) is tuple:
            for each in value:
                self._keep(each)

    def put_back(self) -> None:
        for now, before in self._bound:
            for name in _simple(now).keys() - before.keys():
                del now[name]
            for name in before.keys() & now.keys():
                if now[name] is not before[name]:
                    now[name] = before[name]
        for hooks, kept in self._hooks:
            if [*hooks] != [*kept]:
                hooks.clear()
                hooks.update(kept)
        for value, contents in self._containers.values():
            if [*map(id, _items(value))] == [*map(id, _items(contents))]:
                continue
            value.clear()
            if type(value) is list:
                value.extend(contents)
            else:
                value.update(contents)
        with torch.no_grad():
            for tensor, values in self._tensors.values():
                if tensor.shape != values.shape:
                    tensor.resize_(values.shape)
                if not torch.equal(_bytes(tensor), _bytes(values)):  # a write would be noticed
                    tensor.copy_(values)


def _simple(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a module in which a forward may count or cache."""
    return {
        name: value
        for name, value in attributes.items()
        if type(value) in _SIMPLE and name not in _TORCHS and not name.startswith(_OURS)
    }


def _items(container: Any) -> list[Any]:
    if type(container) is dict:
        return [*container.keys(), *container.values()]
    return list(container)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
