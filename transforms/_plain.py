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
        module.register_state_dict_post_hook(_save),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_before_load),  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(_after_load),  # type: ignore[no-untyped-call]
    ]


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
    for name, tensor in rewrite.plain(module).items():
        if tensor is None:
            state_dict.pop(prefix + name, None)
        else:
            state_dict[prefix + name] = tensor


def _before_load(module: nn.Module, *_: object) -> None:
    vars(module)[_REWRITE].undo()


def _after_load(module: nn.Module, _: object) -> None:
    vars(module)[_REWRITE].redo()


def _move(
    module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """``Module._apply``, on the plain tensors."""
    rewrite = vars(module)[_REWRITE]
    rewrite.undo()
    try:
        type(module)._apply(module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        rewrite.redo()
    return module
