"""Modules whose tensors were rewritten, and the plain tensors that their checkpoints hold.

``state_dict()`` of an optimized model gives what the plain model's would, and ``load_state_dict``
takes it: a rewritten module becomes plain while torch loads into it, and is rewritten from what was
loaded. The same holds while a module moves to another dtype or device. The plain tensors are kept
beside the module's own attributes, where neither ``parameters()`` nor ``state_dict()`` looks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_REWRITE, _HANDLES = "_fusedoptim_rewrite", "_fusedoptim_handles"
_APPLY = "_apply"
"""Moves of all kinds (``to``, ``half``, ``cpu``, ``share_memory``) go through this method."""


class Rewrite(Protocol):
    """What was done to the tensors of one or more modules."""

    def plain(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """The tensors of ``module`` that its checkpoint holds, by their names; None: it has not."""
        ...

    def check(self) -> None:
        """Raise unless the modules can be made plain."""
        ...

    def undo(self) -> None:
        """Make the modules plain, with the values that they had."""
        ...

    def redo(self) -> None:
        """Rewrite the modules from the values that they have; where that cannot be, do nothing."""
        ...

    def kept(self) -> Iterator[Tensor]:
        """The tensors that are kept for :meth:`plain` and :meth:`undo` alone."""
        ...


def attach(module: nn.Module, rewrite: Rewrite) -> None:
    """Let ``module`` save, load and move plain tensors."""
    vars(module)[_REWRITE] = rewrite
    vars(module)[_APPLY] = functools.partial(_move, module)
    vars(module)[_HANDLES] = [
        hook_save(module, _save),
        hook_load(module, _before_load),
        module.register_load_state_dict_post_hook(_after_load),  # type: ignore[no-untyped-call]
    ]


def hook_save(module: nn.Module, hook: Callable[..., object]) -> RemovableHandle:
    """Have ``state_dict`` call ``hook`` before the hooks of others, which see what it gave."""
    handle: RemovableHandle = module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]
    _call_first(module._state_dict_hooks, handle)
    return handle


def hook_load(module: nn.Module, hook: Callable[..., object]) -> RemovableHandle:
    """Have ``load_state_dict`` call ``hook`` before the hooks of others."""
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    _call_first(module._load_state_dict_pre_hooks, handle)
    return handle


def _call_first(hooks: Any, handle: RemovableHandle) -> None:
    hooks.move_to_end(handle.id, last=False)  # an OrderedDict


def detach(module: nn.Module) -> None:
    """Let ``module`` save, load and move the tensors that it has."""
    handles: list[RemovableHandle] = vars(module).pop(_HANDLES, [])
    for handle in handles:
        handle.remove()
    if vars(module).pop(_REWRITE, None) is not None:
        vars(module).pop(_APPLY, None)


def find(module: nn.Module) -> Rewrite | None:
    """What was done to the tensors of ``module``."""
    return vars(module).get(_REWRITE)


def rewrites(model: nn.Module) -> list[Rewrite]:
    """All that was done to the tensors of ``model``, once each."""
    found = [find(module) for module in model.modules()]
    return list({id(rewrite): rewrite for rewrite in found if rewrite is not None}.values())


def check_all(model: nn.Module) -> None:
    """Raise unless all modules can be made plain."""
    for rewrite in rewrites(model):
        rewrite.check()


def changed(module: nn.Module, how: str) -> RuntimeError:
    """The error of a module that was changed so that it cannot be made plain."""
    return RuntimeError(
        f"{type(module).__name__} {how} since transforms.optimize, so its plain tensors cannot be "
        "computed: undo that, or call transforms.finalize(model), after which the model saves what "
        "it computes with"
    )


def undo_all(model: nn.Module) -> None:
    """Make all modules plain."""
    for rewrite in rewrites(model):
        rewrite.undo()
    discard(model)


def discard(model: nn.Module) -> None:
    """Let all modules save, load and move the tensors that they have."""
    for module in model.modules():
        if find(module) is not None:
            detach(module)


def kept_bytes(model: nn.Module) -> int:
    """Of the memory that is kept for undoing."""
    return sum(t.nbytes for rewrite in rewrites(model) for t in rewrite.kept())


def shared_as(values: Tensor, source: Tensor) -> Tensor:
    """``values``, moved to memory that processes share if that of ``source`` is."""
    if source.is_shared():  # type: ignore[no-untyped-call]
        values.share_memory_()  # type: ignore[no-untyped-call]
    return values


def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    rewrite = vars(module)[_REWRITE]
    rewrite.check()
    for name, tensor in rewrite.plain(module).items():
        if tensor is None:
            state_dict.pop(prefix + name, None)
        else:
            state_dict[prefix + name] = tensor


def _before_load(module: nn.Module, *_: object) -> None:
    rewrite = vars(module)[_REWRITE]
    rewrite.check()
    rewrite.undo()


def _after_load(module: nn.Module, _: object) -> None:
    vars(module)[_REWRITE].redo()


def _move(
    module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """``Module._apply``, on the plain tensors."""
    rewrite = vars(module)[_REWRITE]
    rewrite.check()
    rewrite.undo()
    try:
        type(module)._apply(module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        rewrite.redo()
    return module
