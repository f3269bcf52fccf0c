"""Pass: split weights into bfloat16 halves in the model and their lower 16 bits in the optimizer.

Forward and backward passes read 2 bytes of a weight instead of 4. The two halves together are the
exact float32 weight: 4 bytes, where a bfloat16 weight with a float32 master copy takes 6. The
model's state_dict contains the float32 weights and loads them, so checkpoints do not depend on
splitting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedoptim.launch.devices import BACKENDS
from fusedoptim.nn import MergedEmbeddingBag
from fusedoptim.optimizer import FusedOptimizer
from fusedoptim.step.tensors import has_shared_elements
from transforms.inputs.options import SPLIT
from transforms.passes.protocol import Job, Pass
from transforms.reports import Entry
from transforms.rewrites import split
from transforms.rewrites.exchanged_class import own_class

_SPLIT_ALREADY = "already split"


class SplitWeights(Pass):
    """Splits weights into bfloat16 halves in the model and lower halves in the optimizer."""

    knob = SPLIT

    def run(self, job: Job) -> list[Entry]:
        """Split; weights that an earlier call split are not reported again."""
        optimizer = job.optimizer
        assert isinstance(optimizer, FusedOptimizer)  # FuseStep has run, or has raised
        is_first = not optimizer.halves.in_model
        job.undo.callback(_back_to_now(job.model, optimizer))
        entries = split_master_weights(job.model, optimizer)
        return [entry for entry in entries if is_first or entry.what != _SPLIT_ALREADY]

    def undo(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Merge the halves, also those of a model that was copied without its optimizer."""
        if optimizer is not None:
            merge_master_weights(model, optimizer)
        split.merge_copies(model)


class _Use(NamedTuple):
    """A module that uses a parameter."""

    module: nn.Module
    name: str
    """The parameter's name in the model."""


def split_master_weights(model: nn.Module, optimizer: Optimizer) -> list[Entry]:
    """Split weights into bfloat16 halves, in place; the optimizer keeps the lower halves.

    The Parameter objects stay. Run the forward pass under autocast; the output of embeddings stays
    float32.

    Raises:
        RuntimeError: the optimizer's step is not fused.
        ValueError: the optimizer has none of the model's parameters. Nothing was changed then.
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
    merged = {
        p for m in model.modules() if isinstance(m, MergedEmbeddingBag) for p in m.parameters()
    }
    nested = _given_nested_tensors(model)
    chosen: list[Tensor] = []
    entries: list[Entry] = []
    for param, users in uses.items():
        name = users[0].name
        if optimizer.is_split(param):
            entries.append(Entry(name, _SPLIT_ALREADY, done=False))
            continue
        if param not in updated:
            reason: str | None = "the optimizer does not update it"
        elif param in merged:  # it calls no hook of the bag, and may update the weight itself
            reason = "a MergedEmbeddingBag uses it"
        elif any(use.module in nested for use in users):
            reason = (
                "a TransformerEncoder calls its attention with nested tensors, which autocast does "
                "not cast: construct it with enable_nested_tensor=False"
            )
        else:
            reason = _objection(param, users, shared)
        if reason is None:
            chosen.append(param)
            what = "float32 to bfloat16, lower halves in the optimizer"
            entries.append(Entry(name, what, bytes_saved=2 * param.numel()))
        else:
            dtype = str(param.dtype).removeprefix("torch.")
            entries.append(Entry(name, f"stays {dtype}: {reason}", done=False))
    optimizer.split_params(chosen)
    split.attach(model, optimizer.halves, set(chosen))
    return entries


def merge_master_weights(model: nn.Module, optimizer: Optimizer) -> None:
    """Merge a model's halves into float32 weights, in place; those of ``split=True`` stay.

    Raises:
        ValueError: the optimizer has lost a lower half. Nothing was changed then.
    """
    if isinstance(optimizer, FusedOptimizer):
        if not optimizer.split:
            optimizer.merge_params(p for p in model.parameters() if p in optimizer.halves)
        split.detach(model, optimizer.halves)


def _back_to_now(model: nn.Module, optimizer: FusedOptimizer) -> Callable[[], None]:
    """A function that merges, in place, the weights that are split after this call."""
    before = frozenset(optimizer.halves)
    kept = split.split_modules(model)
    grads = [(p, p.grad) for p in model.parameters() if p not in before]

    def undo() -> None:
        if not optimizer.split:
            optimizer.merge_params(p for p in optimizer.halves if p not in before)
        split.detach(model, optimizer.halves, kept)
        for p, grad in grads:  # splitting has rounded them
            p.grad = grad

    return undo


def _uses(model: nn.Module) -> dict[Tensor, list[_Use]]:
    """The modules that use each parameter of the model."""
    uses: dict[Tensor, list[_Use]] = {}
    modules: dict[str, nn.Module] = dict(model.named_modules())
    # An attention computes with the weight of its out_proj, which is not called.
    attentions: dict[nn.Module, nn.Module] = {
        m.out_proj: m for m in modules.values() if isinstance(m, nn.MultiheadAttention)
    }
    for prefix, module in modules.items():
        user = attentions.get(module, module)
        for name, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            uses.setdefault(param, []).append(_Use(user, name))
    return uses


def _given_nested_tensors(model: nn.Module) -> set[nn.Module]:
    """The attentions that get nested tensors in evaluation, if there is a padding mask."""
    encoders = (m for m in model.modules() if isinstance(m, nn.TransformerEncoder))
    return {layer.self_attn for m in encoders if m.use_nested_tensor for layer in m.layers}


def _sharing_memory(params: list[Tensor]) -> set[Tensor]:
    """The parameters that share memory; converting one of them would separate them."""
    owners: dict[int, list[Tensor]] = {}
    for p in params:
        if p.layout is torch.strided and p.numel() and type(p) is nn.Parameter:
            owners.setdefault(p.untyped_storage().data_ptr(), []).append(p)
    return {p for sharing in owners.values() if len(sharing) > 1 for p in sharing}


def _objection(param: Tensor, users: list[_Use], shared: set[Tensor]) -> str | None:
    """Why a parameter is not split, if it is not."""
    for module, name in users:
        names = split.split_names(own_class(module))
        if not names:
            return f"{type(module).__name__} uses it"
        if name.rpartition(".")[2] not in names:
            return "a weight is computed from it"
        if getattr(module, "max_norm", None) is not None:
            return "a forward pass with max_norm writes to it"
    if type(param) is not nn.Parameter:
        return f"it is of type {type(param).__name__}"
    if param.dtype != torch.float32:
        return "only float32 weights are split"
    if param.device.type not in BACKENDS:
        return f"it is on {param.device.type!r}"
    if param in shared or has_shared_elements(param):
        return "its elements share memory"
    return None
