"""Linears that torch computes without calling them, in its fast path for transformer layers."""

from __future__ import annotations

import torch
from torch import nn

from transforms.tracing.modules import computes_like

OBJECTION = (
    "torch.nn.TransformerEncoderLayer computes with its plain weight in its fast path: call "
    "torch.backends.mha.set_fastpath_enabled(False) first"
)
"""Why such a Linear stays as it is."""


def uncalled(model: nn.Module) -> set[nn.Module]:
    """The Linears of ``model`` that are not called while no gradient is recorded."""
    if not torch.backends.mha.get_fastpath_enabled():
        return set()
    layers = (m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer))
    fast = [layer for layer in layers if _takes_fast_path(layer)]
    return {linear for layer in fast for linear in (layer.linear1, layer.linear2)}


def _takes_fast_path(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether the layer meets torch's conditions for a batch of sequences, without hooks."""
    attention = layer.self_attn
    return (
        computes_like(layer, (nn.TransformerEncoderLayer,))
        and attention.batch_first
        and attention.in_proj_weight is not None  # keys and values are as wide as queries
        and attention.in_proj_bias is not None
        and attention.num_heads % 2 == 0
        and layer.activation_relu_or_gelu != 0
        and layer.norm1.eps == layer.norm2.eps
    )
