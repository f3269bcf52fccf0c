"""Copies a module for a trace: the copy shares the module's tensors, and has no hooks."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from transforms.rewrites.plain_tensors import kept_tensors
from transforms.tracing.modules import all_hooks

_CONSTANTS = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types of values that are their own copies."""
_CONTAINERS = frozenset({dict, OrderedDict, list, set})
_COPYING = (
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__new__",
)
"""Methods by which a class changes how its objects are copied."""


def clone(root: nn.Module) -> tuple[nn.Module, dict[nn.Module, nn.Module]]:
    """Copy ``root`` as ``copy.deepcopy`` would, except for its tensors and hooks.

    A model is traced many times, and of each module only the attributes that can change are worth
    a call of ``deepcopy``.

    Returns:
        the copy, and the modules inside ``root`` by their copies.
    """
    modules = list(root.modules())
    memo: dict[int, Any] = {
        id(t): t for t in (*root.parameters(), *root.buffers(), *kept_tensors(root))
    }
    memo |= {id(hooks): OrderedDict() for m in modules for hooks in all_hooks(m)}
    plain = [module for module in modules if _is_copied_by_torch(module)]
    for module in plain:
        memo[id(module)] = type(module).__new__(type(module))
        for shared in (module._parameters, module._buffers, module._non_persistent_buffers_set):
            memo[id(shared)] = shared.copy()
    for module in plain:
        state = module.__getstate__()  # type: ignore[no-untyped-call]  # untyped in torch
        memo[id(module)].__setstate__(_copied(state, memo))
    twin = copy.deepcopy(root, memo)
    return twin, {memo[id(module)]: module for module in modules}


def _copied(attributes: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    copies = {}
    for name, value in attributes.items():
        if type(value) in _CONSTANTS:
            copies[name] = value
        elif type(value) in _CONTAINERS and not value:  # as most kinds of hooks are
            copies[name] = memo.setdefault(id(value), value.copy())
        else:
            copies[name] = copy.deepcopy(value, memo)
    return copies


def _is_copied_by_torch(module: nn.Module) -> bool:
    cls = type(module)
    is_own = cls in copyreg.dispatch_table or "__deepcopy__" in vars(module)
    return not is_own and all(
        getattr(cls, name, None) is getattr(nn.Module, name, None) for name in _COPYING
    )
