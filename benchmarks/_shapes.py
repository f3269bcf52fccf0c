"""The parameter shapes that optimizers are timed on."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import _models

Shape = tuple[int, ...]


def one_large() -> list[Shape]:
    """One tensor of 16.8 M parameters: limited by memory bandwidth only."""
    return [(4096, 4096)]


def one_small() -> list[Shape]:
    """One tensor of 8,192 parameters: the fixed cost of a step."""
    return [(8192,)]


def many_small() -> list[Shape]:
    """10,000 tensors of 1,000 parameters: the cost of each tensor."""
    return [(1000,)] * 10_000


def lora() -> list[Shape]:
    """Adapters of rank 16 for all linear layers of Llama 7B: 448 tensors, 39,976,960 parameters."""
    rank, width, inner = 16, 4096, 11_008
    layer = [(width, width)] * 4 + [(width, inner)] * 2 + [(inner, width)]
    pairs = layer * 32
    return [shape for into, out in pairs for shape in ((rank, into), (out, rank))]


def _shapes_of(make: Callable[[], nn.Module]) -> Callable[[], list[Shape]]:
    """Return a function that returns the shapes of a model's parameters."""

    def shapes() -> list[Shape]:
        with torch.device("meta"):
            return [tuple(p.shape) for p in make().parameters()]

    return shapes


def dlrm() -> list[Shape]:
    """DLRM for Criteo's Kaggle data, large tables truncated: 40 tensors, 49,584,721 parameters.

    Each of the 26 tables has a row for each value of its feature, but at most 500,000, as with
    DLRM's ``--max-ind-range``; without this limit they have 540 M parameters. Source of the layers:
    facebookresearch/dlrm, bench/dlrm_s_criteo_kaggle.sh.
    """
    width, features = 16, 13
    tables: list[Shape] = [(min(rows, 500_000), width) for rows in _CRITEO_KAGGLE]
    vectors = len(tables) + 1  # the bottom layers give one more
    interactions = vectors * (vectors - 1) // 2
    return tables + _mlp(features, 512, 256, 64, width) + _mlp(interactions + width, 512, 256, 1)


def _mlp(*widths: int) -> list[Shape]:
    """The shapes of linear layers' weights and biases."""
    pairs = itertools.pairwise(widths)
    return [shape for before, after in pairs for shape in ((after, before), (after,))]


# Distinct values of each of the 26 categorical features, as DLRM's preprocessing counts them.
_CRITEO_KAGGLE = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)

MODELS: dict[str, Callable[[], list[Shape]]] = {
    "16.8M": one_large,
    "resnet50": _shapes_of(_models.resnet50),
    "bert-base": _shapes_of(_models.bert_base),
    "dlrm": dlrm,
    "10000x1000": many_small,
    "lora": lora,
    "8192": one_small,
}
