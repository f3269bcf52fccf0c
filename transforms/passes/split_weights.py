"""Pass: split weights into bfloat16 halves in the model and their lower 16 bits in the optimizer.

Forward and backward passes read 2 bytes of a weight instead of 4. The two halves together are the
exact float32 weight: 4 bytes, where a bfloat16 weight with a float32 master copy takes 6. The
model's state_dict contains the float32 weights and loads them, so checkpoints do not depend on
splitting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.split.halves import Halves
from fusedoptim.step.tensors import has_shared_elements
from transforms.inputs.options import SPLIT
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import plain_tensors

__all__ = [
    "back_to_now",
    "halves_in",
    "merge_copies",
    "merge_master_weights",
    "split_master_weights",
]

_SPLIT_ALREADY = "already split"

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_COMPUTING = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
"""Modules that autocast runs in bfloat16."""
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_HOOKS = "_fusedoptim_split"
"""The attribute of a module that lists its :class:`_Hooks`."""


class SplitWeights(Pass):
    """Splits weights into bfloat16 halves in the model and lower halves in the optimizer."""

    knob = SPLIT

    def run(self, job: Job) -> list[Entry]:
        """Split; weights that an earlier call split are not reported again."""
        assert job.optimizer is not None
        halves = getattr(job.optimizer, "halves", None)
        is_first = halves is None or not halves.in_model
        job.undo.callback(back_to_now(job.model, job.optimizer))
        entries = split_master_weights(job.model, job.optimizer)
        return [entry for entry in entries if is_first or entry.what != _SPLIT_ALREADY]

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Merge the halves, also those of a model that was copied without its optimizer."""
        if optimizer is not None:
            merge_master_weights(model, optimizer)
        merge_copies(model)


class _Hooks(NamedTuple):
    """The hooks of a module for the halves of one optimizer."""

    halves: Halves
    handles: list[RemovableHandle]


class _Use(NamedTuple):
    """A module that uses a parameter."""

    module: nn.Module
    name: str
    """The parameter's name in the model."""


def split_master_weights(model: nn.Module, optimizer: Optimizer) -> list[Entry]:
    """Split weights into bfloat16 halves, in place; the optimizer keeps the lower halves.

    Those of Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d, Embedding and
    EmbeddingBag, exact classes, if no other module has them too; the Parameter objects stay. The
    rest stays float32. No bit is lost: ``model.state_dict()`` and ``optimizer.state_dict()`` are
    those of the plain pair, and load into it, and its into this one, in any order. A model that is
    moved to another dtype is no longer split: its weights are the exact ones in that dtype.

    The forward pass is to run under ``torch.autocast(device, dtype=torch.bfloat16)``, as IPEX's;
    a Linear or convolution that gets float32 without it says so. What an embedding returns stays
    float32. A copy of the model alone has the exact weights of when it was copied.

    Args:
        model: in training. Weights that are split already stay as they are.
        optimizer: one with a fused step, of parameters of ``model``.

    Returns:
        an entry for each parameter, for the report.

    Raises:
        RuntimeError: the optimizer's step is not fused.
        ValueError: the optimizer has none of the model's parameters. Nothing was changed then.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedSGD
        >>> from transforms.passes.split_weights import split_master_weights
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1)
        >>> for entry in split_master_weights(model, optimizer):
        ...     print(entry.where, "-", entry.what)
        0.weight - float32 to bfloat16, lower halves in the optimizer
        0.bias - float32 to bfloat16, lower halves in the optimizer
        1.weight - stays float32: LayerNorm uses it
        1.bias - stays float32: LayerNorm uses it
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     model(torch.ones(2, 3)).sum().backward()
        >>> optimizer.step()
        >>> model[0].weight.dtype, model.state_dict()["0.weight"].dtype
        (torch.bfloat16, torch.float32)
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise RuntimeError(
            f"split_master_weight_for_bf16=True: the step of {type(optimizer).__name__} is not "
            "fused, and no other can update halves; pass fuse_update_step=True"
        )
    uses = _uses(model)
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    if updated.isdisjoint(uses):
        raise ValueError(
            "the optimizer has none of the model's parameters; make it from model.parameters()"
        )
    shared = _sharing_memory([*uses, *(updated - uses.keys())])
    chosen: list[Tensor] = []
    entries: list[Entry] = []
    for param, users in uses.items():
        name = users[0].name
        reason = (
            _why_not(param, users, shared)
            if param in updated
            else "the optimizer does not update it"
        )
        if optimizer.is_split(param):
            entries.append(Entry(name, _SPLIT_ALREADY, done=False))
        elif reason:
            entries.append(Entry(name, f"stays {_text(param.dtype)}: {reason}", done=False))
        else:
            chosen.append(param)
            what = "float32 to bfloat16, lower halves in the optimizer"
            entries.append(Entry(name, what, bytes_saved=2 * param.numel()))
    optimizer.split_params(chosen)
    _attach(model, optimizer.halves)
    return entries


def merge_master_weights(model: nn.Module, optimizer: Optimizer) -> list[Entry]:
    """Merge a model's halves into float32 weights, in place; the inverse of a split.

    Args:
        model: that :func:`split_master_weights` has split, or not.
        optimizer: that has the lower halves. What was split by ``split=True`` stays so.

    Returns:
        an entry for each parameter, for the report.

    Raises:
        ValueError: the optimizer has lost a lower half. Nothing was changed then.

    Example:
        >>> import torch
        >>> from fusedoptim import FusedSGD
        >>> from transforms.passes.split_weights import merge_master_weights, split_master_weights
        >>> model = torch.nn.Linear(3, 4)
        >>> optimizer = FusedSGD(model.parameters(), lr=0.1)
        >>> weight = model.weight.detach().clone()
        >>> entries = split_master_weights(model, optimizer)
        >>> entries = merge_master_weights(model, optimizer)
        >>> torch.equal(model.weight, weight)
        True
    """
    entries: list[Entry] = []
    if isinstance(optimizer, FusedOptimizer):
        halves = optimizer.halves
        names = {p: users[0].name for p, users in _uses(model).items() if p in halves}
        if not optimizer.split:
            optimizer.merge_params(names)
        what = "stays bfloat16: the optimizer was made with split=True"
        done = Entry("", "float32 restored") if not optimizer.split else Entry("", what, done=False)
        entries += [done._replace(where=name) for name in names.values()]
        _detach(model, halves)
    return entries


def halves_in(model: nn.Module) -> list[Halves]:
    """The halves, one for each optimizer or copy of one, that contain weights of ``model``."""
    found: dict[int, Halves] = {}
    for module in model.modules():
        for hooks in vars(module).get(_HOOKS, ()):
            found[id(hooks.halves)] = hooks.halves
    return list(found.values())


def merge_copies(model: nn.Module) -> None:
    """Merge, in place, the halves of a model that was copied without its optimizer."""
    for halves in halves_in(model):
        if halves.is_alone:
            for p in model.parameters():
                if p in halves:
                    halves.merge(p)
            _detach(model, halves)


def back_to_now(model: nn.Module, optimizer: Optimizer) -> Callable[[], None]:
    """A function that merges, in place, the weights that are split after this call."""
    before = frozenset(optimizer.halves) if isinstance(optimizer, FusedOptimizer) else frozenset()
    hooked = {id(module) for module in model.modules() if _HOOKS in vars(module)}
    grads = [(p, p.grad) for p in model.parameters() if p not in before]

    def undo() -> None:
        if not isinstance(optimizer, FusedOptimizer):
            return
        if not optimizer.split:
            optimizer.merge_params(p for p in optimizer.halves if p not in before)
        _detach(model, optimizer.halves, hooked)
        for p, grad in grads:  # splitting has rounded them
            p.grad = grad

    return undo


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _uses(model: nn.Module) -> dict[Tensor, list[_Use]]:
    """The modules that use each parameter of the model."""
    uses: dict[Tensor, list[_Use]] = {}
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            uses.setdefault(param, []).append(_Use(module, name))
    return uses


def _sharing_memory(params: list[Tensor]) -> set[Tensor]:
    """The parameters that share memory; converting one of them would separate them."""
    owners: dict[int, list[Tensor]] = {}
    for p in params:
        if p.layout is torch.strided and p.numel() and type(p) is nn.Parameter:
            owners.setdefault(p.untyped_storage().data_ptr(), []).append(p)
    return {p for sharing in owners.values() if len(sharing) > 1 for p in sharing}


def _why_not(param: Tensor, users: list[_Use], shared: set[Tensor]) -> str | None:
    """Why a parameter is not split, if it is not."""
    for module, name in users:
        if type(module) not in (*_COMPUTING, *_TABLES):
            return f"{type(module).__name__} uses it"
        if name.rpartition(".")[2] not in ("weight", "bias"):
            return "a weight is computed from it"
        if getattr(module, "max_norm", None) is not None:
            return "a forward pass with max_norm writes to it"
    if type(param) is not nn.Parameter:
        return f"it is a {type(param).__name__}"
    if param.dtype != torch.float32:
        return "only float32 weights are split"
    if param.device.type not in ("cpu", "xpu"):
        return f"it is on {param.device.type!r}"
    if param in shared or has_shared_elements(param):
        return "its elements share memory"
    return None


def _attach(model: nn.Module, halves: Halves) -> None:
    """Make the modules with halves save and load exact values, and compute with the halves."""
    for module in model.modules():
        attached: list[_Hooks] = vars(module).get(_HOOKS, [])
        own = module.parameters(recurse=False)
        if not any(p in halves for p in own) or any(h.halves is halves for h in attached):
            continue
        handles: list[RemovableHandle] = [
            plain_tensors.hook_save(module, _Saving(halves)),
            plain_tensors.hook_load(module, _Loading(halves)),
        ]
        if type(module) in _COMPUTING:
            handles.append(module.register_forward_pre_hook(_require_autocast))
        elif type(module) in _TABLES:
            handles.append(module.register_forward_hook(_return_float32))
            handles.append(module.register_forward_pre_hook(_cast_weights, with_kwargs=True))
        setattr(module, _HOOKS, [*attached, _Hooks(halves, handles)])
        vars(module)["_apply"] = functools.partial(_move, module)
        halves.in_model = True


def _detach(model: nn.Module, halves: Halves, kept: Collection[int] = ()) -> None:
    """Undo :func:`_attach` for these halves; another optimizer's are not touched.

    So do those of the modules whose ids are in ``kept``.
    """
    halves.in_model = False
    for module in model.modules():
        if id(module) in kept:
            own: list[_Hooks] = vars(module)[_HOOKS]
            halves.in_model |= any(hooks.halves is halves for hooks in own)
            continue
        _detach_from(module, lambda attached: attached is halves)


def _detach_from(module: nn.Module, is_done_with: Callable[[Halves], bool]) -> None:
    attached: list[_Hooks] = vars(module).get(_HOOKS, [])
    others = []
    for hooks in attached:
        if is_done_with(hooks.halves):
            for handle in hooks.handles:
                handle.remove()
        else:
            others.append(hooks)
    if others:
        setattr(module, _HOOKS, others)
    elif attached:
        del vars(module)[_HOOKS], vars(module)["_apply"]  # so that torch's own method applies


def _move(
    module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> nn.Module:
    """``Module._apply`` on the exact weights; weights that stay float32 stay split.

    Raises:
        ValueError: the optimizer has lost a lower half. Nothing was changed then.
    """
    split = [
        (name, param, hooks.halves)
        for hooks in vars(module)[_HOOKS]
        for name, param in _halves_of(module, "", hooks.halves)
    ]
    exact = [halves.exact(param) for _, param, halves in split]
    for (_, param, _), values in zip(split, exact):
        _exchange(param, values)
    try:
        type(module)._apply(module, fn, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        for name, param, halves in split:
            is_same = module._parameters[name] is param and not param.is_meta
            if is_same and param.dtype == torch.float32:
                _exchange(
                    param, plain_tensors.shared_as(halves.write(param, param.data), param.data)
                )
            else:
                halves.forget(param)
        own = list(module.parameters(recurse=False))
        _detach_from(module, lambda halves: not any(p in halves for p in own))
    return module


def _exchange(param: Tensor, values: Tensor) -> None:
    """Replace the tensor of a parameter, and cast its gradient to the same dtype."""
    grad, param.grad = param.grad, None
    param.data = values
    if grad is not None:
        param.grad = grad.to(values.dtype)


class _Saving:
    """A ``state_dict`` hook that saves exact values for the halves of a module."""

    def __init__(self, halves: Halves) -> None:
        self._halves = halves

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        for key, param in _halves_of(module, prefix, self._halves):
            if key in state_dict:
                state_dict[key] = self._halves.exact(param)


class _Loading:
    """A ``load_state_dict`` hook that splits the values for the halves of a module."""

    def __init__(self, halves: Halves) -> None:
        self._halves = halves

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        for key, param in _halves_of(module, prefix, self._halves):
            value = state_dict.get(key)
            if not isinstance(value, Tensor) or value.shape != param.shape:
                continue  # torch raises the error
            if metadata.get("assign_to_params_buffers"):
                raise RuntimeError(
                    f"assign=True would replace {key}, which is split in two halves and updated by "
                    "an optimizer; load without it, or transforms.restore(model, optimizer) first"
                )
            exact = value.detach().to(param.device, torch.float32)
            state_dict[key] = self._halves.write(param, exact)


def _halves_of(module: nn.Module, prefix: str, halves: Halves) -> Iterator[tuple[str, Tensor]]:
    """The module's own parameters that are split, with their keys in a state_dict."""
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        if param in halves and param.dtype == torch.bfloat16:
            yield prefix + name, param


def _require_autocast(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Raise if a module with bfloat16 halves gets float32 outside autocast."""
    if not args or args[0].dtype == torch.bfloat16:
        return
    device = args[0].device.type
    if not torch.is_autocast_enabled(device):
        raise RuntimeError(
            f"{type(module).__name__}'s weights are bfloat16 halves and its input is "
            f"{_text(args[0].dtype)}; run the forward pass under torch.autocast({device!r}, "
            "dtype=torch.bfloat16), or transforms.restore(model, optimizer) first"
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
