"""Linears that torch computes without calling them, in its fast path for transformer layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from transforms.tracing.modules import plain_kind

OBJECTION = (
    "torch.nn.TransformerEncoderLayer computes with its plain weight in its fast path: call "
    "torch.backends.mha.set_fastpath_enabled(False) first"
)
"""Why such a Linear stays as it is."""


def uncalled(model: nn.Module) -> set[nn.Module]:
    """The Linears of ``model`` that are not called while no gradient is recorded."""
    if not torch.backends.mha.get_fastpath_enabled():
        return set()
    return {linear for module in model.modules() for linear in _uncalled(module)}


def _uncalled(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.TransformerEncoderLayer) and _takes_fast_path(module):
        yield from (module.linear1, module.linear2)


def _takes_fast_path(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether the layer meets torch's conditions for a batch of sequences, without hooks."""
    attention = layer.self_attn
    return (
        plain_kind(layer, (nn.TransformerEncoderLayer,)) is not None
        and attention.batch_first
        and attention.in_proj_weight is not None  # keys and values are as wide as queries
        and attention.in_proj_bias is not None
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu != 0
        and layer.norm1.eps == layer.norm2.eps
    )
