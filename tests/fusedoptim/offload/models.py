"""Pairs of equal small models: one with its optimizer on the host, one with an ordinary one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fusedoptim.offload import OffloadOptimizer

SMALL = 1e-4
"""A bucket_cap_mb of a hundred bytes, which makes several buckets of the smallest model."""
BF16 = torch.bfloat16


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2)
    return nn.Sequential(*layers).to(dtype)


def networks(dtype: torch.dtype, cls: Callable[..., Any], **kwargs: Any) -> list[tuple[Any, Any]]:
    """Two equal models and their optimizers, the first of which is on the host."""
    model = network(dtype)
    other = copy.deepcopy(model)
    own = {name: kwargs.pop(name) for name in ("copy_in_backward",) if name in kwargs}
    offload = OffloadOptimizer(model.parameters(), cls, bucket_cap_mb=SMALL, **own, **kwargs)
    return [(model, offload), (other, cls(other.parameters(), **kwargs))]


def backward(model: Any, seed: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(batch).float().square().mean().backward()


def assert_equal_models(*pairs: tuple[Any, Any]) -> None:
    (model, _), (other, _) = pairs
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.dtype == q.dtype
        assert torch.equal(p, q)
