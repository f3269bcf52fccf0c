"""Modules that compute by one of our classes: the object, its attributes and its hooks stay."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.utils import parametrize

from transforms.rewrites.undoing import Undo

_BEFORE = "_fusedoptim_exchanged"


def exchange(module: nn.Module, ours: type[nn.Module], undo: Undo, **attributes: object) -> None:
    """Give a module another class.

    Args:
        module: the module. If it has one of our classes already, that one is suspended.
        ours: the new class.
        undo: gets a callback that reverts it.
        attributes: attributes that instances of the new class have, and the module may lack.
    """
    own = vars(module)
    if _BEFORE in own:  # the record holds one class, the module's own
        suspend(module, undo)
    undo.callback(revert, module)
    own[_BEFORE] = type(module), {name: own[name] for name in attributes if name in own}, attributes
    become(module, ours)
    own.update(attributes)


def revert_all(model: nn.Module) -> None:
    """Give all modules of ``model`` their own classes again."""
    for module in model.modules():
        revert(module)


def check_all(model: nn.Module) -> None:
    """Raise unless all modules of ``model`` can get their own classes again."""
    for module in model.modules():
        _check(module)


def _check(module: nn.Module) -> None:
    """Raise if a parametrization has replaced our class by its own, without a plain tensor."""
    if _BEFORE in vars(module) and parametrize.is_parametrized(module):
        raise RuntimeError(
            f"{type(module).__name__} was parametrized since transforms.optimize, so its own class "
            "cannot be restored: call torch.nn.utils.parametrize.remove_parametrizations first"
        )


def suspend(module: nn.Module, undo: Undo) -> None:
    """Give ``module`` its own class again; ``undo`` gets a callback that replaces it as before."""
    _check(module)
    ours, attributes = type(module), dict(vars(module))

    def resume() -> None:
        become(module, ours)
        vars(module).clear()
        vars(module).update(attributes)

    undo.callback(resume)
    revert(module)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before it was replaced, which computes the same."""
    own = vars(module)
    return own[_BEFORE][0] if _BEFORE in own else type(module)


def plain_copy(module: nn.Module) -> nn.Module:
    """A module of the original class, with the same tensors and children."""
    plain = copy.copy(module)
    revert(plain)
    return plain


def revert(module: nn.Module) -> None:
    """Give ``module`` its own class again, if it was replaced."""
    own = vars(module)
    if _BEFORE in own:
        kind, before, given = own[_BEFORE]
        become(module, kind)
        for name in given:
            own.pop(name, None)  # an interrupt may have come before it was set
        own.update(before)
        del own[_BEFORE]  # last: until then, revert() can be repeated


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Replace the class of ``module``, without ``nn.Module.__setattr__``.

    An interrupt may come in the middle of that method, which is Python code.
    """
    object.__setattr__(module, "__class__", kind)
