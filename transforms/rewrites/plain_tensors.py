"""Keeps checkpoints of rewritten modules plain.

``state_dict()`` of an optimized model returns the plain model's tensors, and ``load_state_dict``
accepts them. A rewritten module becomes plain while torch loads into it, and is then rewritten from
the loaded values. The same happens while a module moves to another dtype or device. The plain
tensors are kept in attributes that neither ``parameters()`` nor ``state_dict()`` includes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

_REWRITE, _HANDLES = "_fusedoptim_rewrite", "_fusedoptim_handles"
_OWN = "_fusedoptim_own"
"""Holds the module's Parameters while torch loads into it."""
_APPLY = "_apply"
"""The method behind ``to``, ``half``, ``cpu`` and ``share_memory``."""


class Rewrite(Protocol):
    """A change to the tensors of one or more modules."""

    def plain(self, module: nn.Module) -> Mapping[str, Tensor | None]:
        """The tensors of the module's checkpoint, by name; None removes a name from it."""
        ...

    def reason_undone(self, module: nn.Module) -> str | None:
        """Why what the report says about ``module`` no longer holds; None if it does."""
        ...

    def check(self) -> None:
        """Raise unless the modules can be made plain."""
        ...

    def undo(self) -> None:
        """Make the modules plain; after an interrupt, another call finishes that."""
        ...

    def redo(self) -> None:
        """Rewrite the plain modules; do nothing to those that cannot be rewritten."""
        ...

    def kept(self) -> Iterator[Tensor]:
        """The tensors that are kept only for :meth:`plain` and :meth:`undo`."""
        ...


def attach(module: nn.Module, rewrite: Rewrite) -> None:
    """Make ``module`` save, load and move its plain tensors."""
    own = vars(module)
    own[_REWRITE] = rewrite
    own[_APPLY] = functools.partial(_move, module)
    own[_HANDLES] = [
        hook_save(module, _save),
        hook_load(module, _before_load),
        module.register_load_state_dict_post_hook(_after_load),  # type: ignore[no-untyped-call]  # untyped in torch
    ]


def hook_save(module: nn.Module, hook: Callable[..., object]) -> RemovableHandle:
    """Register a ``state_dict`` hook that runs before all others, so that they see its result."""
    handle: RemovableHandle = module.register_state_dict_post_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
    _call_first(module._state_dict_hooks, handle)
    return handle


def hook_load(module: nn.Module, hook: Callable[..., object]) -> RemovableHandle:
    """Register a ``load_state_dict`` hook that runs before all others."""
    handle: RemovableHandle = module.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]  # untyped in torch
    _call_first(module._load_state_dict_pre_hooks, handle)
    return handle


def _call_first(hooks: Any, handle: RemovableHandle) -> None:
    hooks.move_to_end(handle.id, last=False)  # an OrderedDict


def detach(module: nn.Module) -> None:
    """Make ``module`` save, load and move its current tensors."""
    own = vars(module)
    handles: list[RemovableHandle] = own.get(_HANDLES, [])
    for handle in handles:
        handle.remove()
    own.pop(_HANDLES, None)
    own.pop(_OWN, None)  # is there if a hook of the module raised while torch loaded
    if _REWRITE in own:
        own.pop(_APPLY, None)
        del own[_REWRITE]  # last: until then, detach() can be repeated


def find(module: nn.Module) -> Rewrite | None:
    """The rewrite of ``module``, if any."""
    return vars(module).get(_REWRITE)


def rewrites(model: nn.Module) -> list[Rewrite]:
    """The rewrites of all modules of ``model``, without duplicates."""
    found = [find(module) for module in model.modules()]
    return list({id(rewrite): rewrite for rewrite in found if rewrite is not None}.values())


def check_all(model: nn.Module) -> None:
    """Raise unless all modules can be made plain."""
    for rewrite in rewrites(model):
        rewrite.check()


def changed(module: nn.Module, how: str) -> RuntimeError:
    """The error for a module that was changed so that it cannot be made plain."""
    return RuntimeError(
        f"{type(module).__name__} {how} since transforms.optimize, so its plain tensors cannot be "
        "computed: undo that, or call transforms.finalize(model), after which the model saves the "
        "tensors that it computes with"
    )


def undo_all(model: nn.Module) -> None:
    """Make all modules plain."""
    for rewrite in rewrites(model):
        rewrite.undo()
    discard(model)


def discard(model: nn.Module) -> None:
    """Make all modules save, load and move their current tensors."""
    for module in model.modules():
        if find(module) is not None:
            detach(module)


def kept_bytes(model: nn.Module) -> int:
    """The bytes of memory that are kept for undoing."""
    return sum(t.nbytes for t in kept_tensors(model))


def kept_tensors(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that are kept for plain checkpoints."""
    return (t for rewrite in rewrites(model) for t in rewrite.kept())


def with_strides(values: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of ``values`` with these strides."""
    result = torch.empty_strided(values.shape, strides, dtype=values.dtype, device=values.device)
    return result.copy_(values)


def shared_as(values: Tensor, source: Tensor) -> Tensor:
    """Move ``values`` to shared memory if ``source`` is there, and return them."""
    if source.is_shared():  # type: ignore[no-untyped-call]  # untyped in torch
        values.share_memory_()  # type: ignore[no-untyped-call]  # untyped in torch
    return values


@torch.inference_mode(False)  # otherwise what is computed here could not be trained
def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    rewrite = vars(module)[_REWRITE]
    rewrite.check()
    for name, tensor in rewrite.plain(module).items():
        if tensor is None:
            state_dict.pop(prefix + name, None)
        else:
            state_dict[prefix + name] = tensor


@torch.inference_mode(False)  # as above
def _before_load(module: nn.Module, *_: object) -> None:
    rewrite = vars(module)[_REWRITE]
    rewrite.check()
    rewrite.undo()
    vars(module)[_OWN] = list(module._parameters.values())


@torch.inference_mode(False)  # as above
def _after_load(module: nn.Module, _: object) -> None:
    own = set(map(id, vars(module).pop(_OWN, module._parameters.values())))
    for name, param in module._parameters.items():
        if param is not None and id(param) not in own:  # assigned: another model may hold it too
            module._parameters[name] = Parameter(param.data, param.requires_grad)
    vars(module)[_REWRITE].redo()


def _move(
    module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """``Module._apply`` on the plain tensors."""
    rewrite = vars(module)[_REWRITE]
    rewrite.check()
    with torch.inference_mode(False):
        rewrite.undo()
    try:
        type(module)._apply(module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch
    finally:
        with torch.inference_mode(False):
            rewrite.redo()
    return module
