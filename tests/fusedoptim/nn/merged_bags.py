"""A MergedEmbeddingBag over random tables, and how it is trained with random batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedoptim.nn import MergedEmbeddingBag
from tests.fusedoptim.bag_cases import ROWS, Bags, new_bags

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
LR = 0.1
STEPS = 4


def new_module(
    optimizer: str | None,
    width: int = 20,
    dtype: torch.dtype = torch.float32,
    modes: Sequence[str] = ("sum",),
    padding: int | None = None,
    **options: Any,
) -> MergedEmbeddingBag:
    bags = [
        torch.nn.EmbeddingBag(
            rows,
            width + 3 * t,
            mode=modes[t % len(modes)],
            dtype=dtype,
            padding_idx=padding,
            include_last_offset=True,
        )
        for t, rows in enumerate(ROWS)
    ]
    return MergedEmbeddingBag.from_embedding_bags(bags, optimizer=optimizer, **options)


def weights_of(module: MergedEmbeddingBag) -> list[Tensor]:
    return [bag.weight.detach() for bag in module]


def train(module: MergedEmbeddingBag, batches: Sequence[tuple[Bags, list[Tensor]]]) -> None:
    for bags, grads in batches:
        outputs = module(*bags)
        torch.autograd.backward(outputs, [g.to(y.dtype) for g, y in zip(grads, outputs)])
        module.optimizer().step()


def new_batches(module: MergedEmbeddingBag, count: int = STEPS) -> list[tuple[Bags, list[Tensor]]]:
    return [
        (new_bags(ROWS), [torch.randn(9, bag.embedding_dim) for bag in module])
        for _ in range(count)
    ]
