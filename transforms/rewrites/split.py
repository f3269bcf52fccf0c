"""Modules with split weights: they compute with upper halves, and save, load and move exact values.

The lower halves are in the optimizer's state. If the model alone is copied, they are copied too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from fusedoptim.nn import MultiheadAttention
from fusedoptim.split.halves import Halves
from fusedoptim.step.sharding import local_of
from transforms.rewrites import exchanged_class, plain_tensors
from transforms.tracing.modules import CONVOLUTIONS, TRANSPOSED, transposed_linears

TABLES = (nn.Embedding, nn.EmbeddingBag)
_ATTENTION = (nn.MultiheadAttention, MultiheadAttention)
_OF_ATTENTION = (
    *("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("weight", "bias"),  # of its out_proj
)
_SPLIT = "_fusedoptim_split"
"""The attribute of a module that holds its :class:`_Split`."""


def split_names(kind: type[nn.Module]) -> tuple[str, ...]:
    """The parameters of a class of modules that may be bfloat16, by name."""
    if kind in _ATTENTION:
        return _OF_ATTENTION
    return ("weight", "bias") if kind in TABLES or kind in _computing() else ()


def _computing() -> tuple[type[nn.Module], ...]:
    """The classes of modules that autocast runs in bfloat16."""
    return nn.Linear, *CONVOLUTIONS, *TRANSPOSED, *transposed_linears(), *_ATTENTION


class _Split(NamedTuple):
    halves: list[Halves]
    """One for each optimizer that has split weights of the module."""
    handles: list[RemovableHandle]


def attach(model: nn.Module, halves: Halves, new: Collection[Tensor]) -> None:
    """Make the modules with these halves compute, and save, load and move exact values.

    Args:
        model: the model.
        halves: the halves of an optimizer.
        new: those of them that were float32 in the model until now.
    """
    _average_exact_values()
    for module in model.modules():
        if not any(p in halves for p in module.parameters(recurse=False)):
            continue
        halves.in_model = True
        split: _Split | None = vars(module).get(_SPLIT)
        if split is None:
            was_float32 = any(p in new for p in module.parameters(recurse=False))
            vars(module)[_SPLIT] = _Split([halves], _hook(module, was_float32))
            vars(module)["_apply"] = functools.partial(_move, module)
        elif not any(each is halves for each in split.halves):
            split.halves.append(halves)


def _hook(module: nn.Module, was_float32: bool) -> list[RemovableHandle]:
    register: Any = module.register_load_state_dict_post_hook
    handles = [
        plain_tensors.hook_save(module, _save),
        plain_tensors.hook_load(module, _load),
        register(_note_loaded),
    ]
    kind = exchanged_class.own_class(module)
    if kind in _computing():
        handles.append(module.register_forward_pre_hook(_require_autocast))
    elif kind in TABLES and was_float32:
        handles.append(module.register_forward_hook(_return_float32))
        handles.append(module.register_forward_pre_hook(_cast_weights, with_kwargs=True))
    return handles


def detach(model: nn.Module, halves: Halves, kept: Collection[nn.Module] = ()) -> None:
    """Undo :func:`attach` for these halves, except in the modules in ``kept``."""
    halves.in_model = False
    for module in model.modules():
        if module not in kept:
            _detach_from(module, lambda each: each is halves)
        elif any(each is halves for each in vars(module)[_SPLIT].halves):
            halves.in_model = True


def _detach_from(module: nn.Module, is_done_with: Callable[[Halves], bool]) -> None:
    split: _Split | None = vars(module).get(_SPLIT)
    if split is None:
        return
    split.halves[:] = [halves for halves in split.halves if not is_done_with(halves)]
    if not split.halves:
        for handle in split.handles:
            handle.remove()
        vars(module).pop("_apply", None)
        vars(module).pop(_SPLIT)  # last: until then, this can be repeated


def split_modules(model: nn.Module) -> set[nn.Module]:
    """The modules of ``model`` with split weights."""
    return {module for module in model.modules() if _SPLIT in vars(module)}


def halves_in(model: nn.Module) -> list[Halves]:
    """The halves, one for each optimizer or copy of one, that contain weights of ``model``."""
    found = chain.from_iterable(vars(module)[_SPLIT].halves for module in split_modules(model))
    return list({id(halves): halves for halves in found}.values())


def merge_copies(model: nn.Module) -> None:
    """Merge, in place, the halves of a model that was copied without its optimizer."""
    for halves in halves_in(model):
        if halves.is_alone:
            for p in model.parameters():
                if p in halves:
                    halves.merge(p)
            detach(model, halves)


def _halves_of(module: nn.Module) -> list[tuple[str, Tensor, Halves]]:
    """The module's own split parameters: their names, the parameters, and their halves."""
    split: _Split | None = vars(module).get(_SPLIT)
    return [
        (name, param, halves)
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False)
        for halves in (split.halves if split is not None else ())
        if param in halves and param.dtype == torch.bfloat16
    ]


def _save(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    for name, param, halves in _halves_of(module):
        if prefix + name in state_dict:
            state_dict[prefix + name] = halves.exact(param)


def _load(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: object
) -> None:
    for name, param, halves in _halves_of(module):
        key = prefix + name
        value = state_dict.get(key)
        if not isinstance(value, Tensor) or value.shape != param.shape:
            continue  # torch raises the error
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(
                f"assign=True would replace {key}, which is split in two halves and updated by "
                "an optimizer; load without it, or transforms.restore(model, optimizer) first"
            )
        exact = value.detach().to(param.device, torch.float32)
        state_dict[key] = halves.write(param, exact)


def _note_loaded(module: nn.Module, _: object) -> None:
    for _name, param, halves in _halves_of(module):
        halves.note_values(param)


def _move(
    module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """``Module._apply`` on the exact weights; weights that stay float32 stay split.

    An interrupt leaves some of them moved, as in torch, and each of them split or whole.

    Raises:
        ValueError: the optimizer has lost a lower half. Nothing was changed then.
    """
    exact = _OnExactValues(fn, _halves_of(module))
    try:
        type(module)._apply(module, exact, *args, **kwargs)  # type: ignore[no-untyped-call]  # untyped in torch
    finally:
        try:
            exact.settle(module)
        except BaseException:  # an interrupt
            exact.settle(module)
            raise
    return module


class _OnExactValues:
    """A function that ``Module._apply`` calls, on the exact values of split parameters."""

    def __init__(
        self, fn: Callable[[Tensor], Tensor], split: list[tuple[str, Tensor, Halves]]
    ) -> None:
        for _, param, halves in split:
            halves.trail(param)  # raises if it is lost
        self._fn = fn
        self._split = split
        self._addresses = {param: local_of(param).data_ptr() for _, param, _ in split}
        self._grads = [(param.grad, param) for _, param, _ in split if param.grad is not None]
        self._whole: dict[Tensor, torch.dtype] = {}
        """The dtypes of the parameters that torch is to make whole."""

    def __call__(self, t: Tensor) -> Tensor:
        for _, param, halves in self._split:
            if t is param and t in halves and t.dtype == torch.bfloat16 and t not in self._whole:
                return self._moved(t, halves)
        for grad, param in self._grads:
            if t is grad:
                exact = t.float() if t.dtype == torch.bfloat16 else t
                return self._fn(exact).to(self._whole.get(param, param.dtype))
        return self._fn(t)

    def _moved(self, param: Tensor, halves: Halves) -> Tensor:
        """What torch is to replace the values of a parameter by."""
        values = self._fn(halves.exact(param))
        if values.dtype == torch.float32 and _is_set(values):
            return plain_tensors.shared_as(halves.write(param, values), values)
        self._whole[param] = values.dtype
        return values

    def settle(self, module: nn.Module) -> None:
        """Forget what is no longer split; after an interrupt, another call finishes that."""
        for name, param, halves in self._split:
            if param.grad is not None and param.grad.dtype != param.dtype:  # an interrupt came
                param.grad = param.grad.to(param.dtype)
            is_there = module._parameters[name] is param and param.dtype == torch.bfloat16
            # torch may have been interrupted before it made the parameter whole.
            is_old = is_there and local_of(param).data_ptr() == self._addresses[param]
            if is_old or (is_there and param not in self._whole):
                halves.note_values(param)
            else:
                halves.forget(param)
        own = list(module.parameters(recurse=False))
        _detach_from(module, lambda halves: not any(p in halves for p in own))


def _is_set(values: Tensor) -> bool:
    """Whether torch gives a Parameter these values, rather than make another Parameter."""
    is_replaced = torch.__future__.get_overwrite_module_params_on_conversion()
    return not is_replaced and values.device.type not in ("meta", "xla", "lazy")


def _require_autocast(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise if a module with bfloat16 halves gets float32 outside autocast."""
    if not args or args[0].dtype == torch.bfloat16:
        return
    device = args[0].device.type
    if not torch.is_autocast_enabled(device):
        dtype = str(args[0].dtype).removeprefix("torch.")
        raise RuntimeError(
            f"{type(module).__name__}'s weights are bfloat16 halves and its input is {dtype}; run "
            f"the forward pass under torch.autocast({device!r}, dtype=torch.bfloat16), or "
            "transforms.restore(model, optimizer) first"
        )


def _return_float32(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Cast the output, so that later layers compute in the same dtype as before."""
    return output.float()


def _cast_weights(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Cast an EmbeddingBag's per-sample weights to the dtype of the table."""
    if kwargs.get("per_sample_weights") is not None:
        weights = kwargs["per_sample_weights"].to(torch.bfloat16)
        return args, {**kwargs, "per_sample_weights": weights}
    if len(args) > 2 and args[2] is not None:  # after input and offsets
        return (*args[:2], args[2].to(torch.bfloat16), *args[3:]), kwargs
    return None


@functools.cache
def _average_exact_values() -> None:
    """Make each later AveragedModel of a split model average exact values.

    It reads ``parameters()``, which are the upper halves. Its copy of the model becomes float32
    when it is first updated.
    """

    def on_registration(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(module, AveragedModel) and child is not None and split_modules(child):
            vars(module)["update_parameters"] = functools.partial(_update_average, module)

    register_module_module_registration_hook(on_registration)


def _update_average(average: AveragedModel, model: nn.Module) -> None:
    merge_copies(average.module)
    exact = {p: halves.exact(p) for m in model.modules() for _, p, halves in _halves_of(m)}
    source: Any = SimpleNamespace(
        parameters=lambda: (exact.get(p, p) for p in model.parameters()), buffers=model.buffers
    )
    type(average).update_parameters(average, source)
