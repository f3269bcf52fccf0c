"""The parameter shapes that optimizers are timed on, generated from the architectures."""

from __future__ import annotations

import itertools
from collections.abc import Callable

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


def resnet50() -> list[Shape]:
    """ResNet-50 of torchvision: 161 tensors, 25,557,032 parameters."""
    shapes = _conv_and_norm(64, 3, 7)
    width_in = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += _conv_and_norm(width, width_in, 1)
            shapes += _conv_and_norm(width, width, 3)
            shapes += _conv_and_norm(4 * width, width, 1)
            if block == 0:
                shapes += _conv_and_norm(4 * width, width_in, 1)
            width_in = 4 * width
    return shapes + _linear(1000, width_in)


def bert_base() -> list[Shape]:
    """BERT base uncased with its pooler: 199 tensors, 109,482,240 parameters."""
    width, vocabulary, positions, segments = 768, 30_522, 512, 2
    norm: list[Shape] = [(width,), (width,)]
    square = _linear(width, width)
    attention = 4 * square + norm  # query, key, value, output
    feed_forward = _linear(4 * width, width) + _linear(width, 4 * width) + norm
    embeddings: list[Shape] = [(vocabulary, width), (positions, width), (segments, width)]
    return embeddings + norm + 12 * (attention + feed_forward) + square


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


def _conv_and_norm(width_out: int, width_in: int, kernel: int) -> list[Shape]:
    return [(width_out, width_in, kernel, kernel), (width_out,), (width_out,)]


def _linear(width_out: int, width_in: int) -> list[Shape]:
    return [(width_out, width_in), (width_out,)]


def _mlp(*widths: int) -> list[Shape]:
    layers = [_linear(width_out, width_in) for width_in, width_out in itertools.pairwise(widths)]
    return list(itertools.chain.from_iterable(layers))


# Distinct values of each of the 26 categorical features, as DLRM's preprocessing counts them.
_CRITEO_KAGGLE = (
    *(1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194),
    *(27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)

MODELS: dict[str, Callable[[], list[Shape]]] = {
    "16.8M": one_large,
    "resnet50": resnet50,
    "bert-base": bert_base,
    "dlrm": dlrm,
    "10000x1000": many_small,
    "8192": one_small,
}
