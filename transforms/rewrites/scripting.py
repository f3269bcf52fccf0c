"""What ``torch.jit.script`` compiles in place of rewritten modules, which it cannot compile.

torch lets a module name another one for that, by ``__prepare_scriptable__``, but puts it into the
model that it was given. That would undo the rewrite of a model in use, and leave its report and its
checkpoints behind. So torch gets a copy of the modules that lead to a rewritten one, which shares
all tensors, and in which rewritten modules have their own classes.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.jit import _script

from transforms.rewrites import exchanged_class

_prepare: Any = getattr(_script, "call_prepare_scriptable_func", None)


class ScriptedAsOwn(nn.Module):
    """The base class of rewritten modules that are compiled as modules of their own class."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise RuntimeError: another torch, in which :func:`_prepare_copy` is not called."""
        raise RuntimeError(
            f"this {type(self).__name__} cannot be scripted: call transforms.restore(model) first, "
            "or script the model before it is optimized"
        )


def _prepare_copy(model: Any) -> Any:
    """What torch compiles for ``model``, which stays as it is."""
    return _prepare(_copied(model, {}) if isinstance(model, nn.Module) else model)


def _copied(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy that shares tensors, and modules without rewritten ones in them."""
    if module in copies:
        return copies[module]
    if isinstance(module, ScriptedAsOwn):
        twin = exchanged_class.plain_copy(module)
    elif any(isinstance(inner, ScriptedAsOwn) for inner in module.modules()):
        twin = object.__new__(type(module))
        vars(twin).update(vars(module))
    else:
        return module
    copies[module] = twin
    own = vars(twin)
    own["_modules"] = dict(own["_modules"])
    for attributes in (own, own["_modules"]):  # torch also looks for modules in plain attributes
        for name, value in attributes.items():
            if isinstance(value, nn.Module):
                attributes[name] = _copied(value, copies)
    return twin


if _prepare is not None:
    _script.call_prepare_scriptable_func = _prepare_copy
