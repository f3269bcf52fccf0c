"""Models with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Bottleneck(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv_and_norm(width_in, width, 1),
            nn.ReLU(inplace=True),
            *_conv_and_norm(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_and_norm(width, 4 * width, 1),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or width_in != 4 * width:
            self.shortcut.extend(_conv_and_norm(width_in, 4 * width, 1, stride))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x) + self.shortcut(x))


def _conv_and_norm(
    width_in: int, width: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    norm = nn.BatchNorm2d(width)
    with torch.no_grad():
        nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]  # None only without running statistics
    return [
        nn.Conv2d(width_in, width, kernel, stride, kernel // 2, groups=groups, bias=False),
        norm,
    ]


def resnet50() -> nn.Module:
    """ResNet-50 with torchvision's layers: 161 tensors, 25,557,032 parameters."""
    layers = [
        *_conv_and_norm(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    width_in = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(_Bottleneck(width_in, width, stride if block == 0 else 1))
            width_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width_in, 1000))


class _SqueezeExcite(nn.Module):
    """Scales each channel by a factor that a small network computes from all channels' means."""

    def __init__(
        self, width: int, squeezed: int, activation: type[nn.Module], gate: type[nn.Module]
    ) -> None:
        super().__init__()
        self.scales = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, squeezed, 1),
            activation(),
            nn.Conv2d(squeezed, width, 1),
            gate(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.scales(x) * x


class _InvertedResidual(nn.Module):
    """Expands the channels, convolves each channel separately, and projects them to fewer."""

    def __init__(
        self,
        width_in: int,
        expanded: int,
        width: int,
        kernel: int,
        stride: int,
        activation: type[nn.Module],
        excite: nn.Module | None,
    ) -> None:
        super().__init__()
        self.is_residual = stride == 1 and width_in == width
        self.body = nn.Sequential()
        if expanded != width_in:
            self.body.extend([*_conv_and_norm(width_in, expanded, 1), activation()])
        depthwise = _conv_and_norm(expanded, expanded, kernel, stride, groups=expanded)
        self.body.extend([*depthwise, activation()])
        if excite:
            self.body.append(excite)
        self.body.extend(_conv_and_norm(expanded, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.is_residual else self.body(x)


class _Mobile(NamedTuple):
    """A block of MobileNetV3."""

    kernel: int
    expanded: int
    width: int
    squeezed: int
    """Width within its squeeze-and-excite, or 0 if it has none."""
    activation: type[nn.Module]
    stride: int


_MOBILE_NET_V3_LARGE = (
    _Mobile(3, 16, 16, 0, nn.ReLU, 1),
    _Mobile(3, 64, 24, 0, nn.ReLU, 2),
    _Mobile(3, 72, 24, 0, nn.ReLU, 1),
    _Mobile(5, 72, 40, 24, nn.ReLU, 2),
    _Mobile(5, 120, 40, 32, nn.ReLU, 1),
    _Mobile(5, 120, 40, 32, nn.ReLU, 1),
    _Mobile(3, 240, 80, 0, nn.Hardswish, 2),
    _Mobile(3, 200, 80, 0, nn.Hardswish, 1),
    _Mobile(3, 184, 80, 0, nn.Hardswish, 1),
    _Mobile(3, 184, 80, 0, nn.Hardswish, 1),
    _Mobile(3, 480, 112, 120, nn.Hardswish, 1),
    _Mobile(3, 672, 112, 168, nn.Hardswish, 1),
    _Mobile(5, 672, 160, 168, nn.Hardswish, 2),
    _Mobile(5, 960, 160, 240, nn.Hardswish, 1),
    _Mobile(5, 960, 160, 240, nn.Hardswish, 1),
)


def mobilenet_v3_large() -> nn.Module:
    """MobileNetV3-large with torchvision's layers: 174 tensors, 5,483,032 parameters."""
    width = 16
    layers = [*_conv_and_norm(3, width, 3, 2), nn.Hardswish()]
    for kernel, expanded, width_out, squeezed, activation, stride in _MOBILE_NET_V3_LARGE:
        excite = _SqueezeExcite(expanded, squeezed, nn.ReLU, nn.Hardsigmoid) if squeezed else None
        layers.append(
            _InvertedResidual(width, expanded, width_out, kernel, stride, activation, excite)
        )
        width = width_out
    layers += [*_conv_and_norm(width, 960, 1), nn.Hardswish()]
    head = nn.Linear(960, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, 1000)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


_EFFICIENT_NET_B0 = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""Expansion, kernel, stride of the first block, width and number of blocks."""


def efficientnet_b0() -> nn.Module:
    """EfficientNet-B0 with torchvision's layers: 213 tensors, 5,288,548 parameters."""
    width = 32
    layers = [*_conv_and_norm(3, width, 3, 2), nn.SiLU()]
    for expansion, kernel, first_stride, width_out, blocks in _EFFICIENT_NET_B0:
        for block in range(blocks):
            expanded, stride = expansion * width, first_stride if block == 0 else 1
            excite = _SqueezeExcite(expanded, width // 4, nn.SiLU, nn.Sigmoid)
            layers.append(
                _InvertedResidual(width, expanded, width_out, kernel, stride, nn.SiLU, excite)
            )
            width = width_out
    layers += [*_conv_and_norm(width, 1280, 1), nn.SiLU()]
    head = nn.Dropout(0.2), nn.Linear(1280, 1000)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head)


class _BertLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.attended = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropouts = nn.ModuleList(nn.Dropout(0.1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (-1, 64)).transpose(1, 2) for f in self._inputs()]
        y = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.dropouts[0](self.attended(y)))
        return self.norms[1](x + self.dropouts[1](self.down(nn.functional.gelu(self.up(x)))))

    def _inputs(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.query, self.key, self.value


class _Bert(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.positions, self.segments = (
            nn.Embedding(rows, width) for rows in (30_522, 512, 2)
        )
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.Sequential(*(_BertLayer(width) for _ in range(layers)))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.positions(places) + self.segments(torch.zeros_like(tokens))
        return self.pooler(self.layers(self.dropout(self.norm(x)))[:, 0]).tanh()


def bert_base() -> nn.Module:
    """BERT base uncased with its pooler: 199 tensors, 109,482,240 parameters."""
    return _Bert(768, 12)


def digits_network() -> nn.Module:
    """Four convolutions on images of 8 by 8 pixels: 67,978 weights, as in examples/digits.py."""
    layers: list[nn.Module] = []
    for i, (width_in, width) in enumerate(((1, 32), (32, 32), (32, 64), (64, 64))):
        layers += [*_conv_and_norm(width_in, width, 3), nn.ReLU()]
        if i % 2:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


class DLRM(nn.Module):
    """Facebook's recommendation model; a table looks up one row for each sample."""

    def __init__(self, rows: Sequence[int], width: int, dense: int = 13) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.bottom = _mlp(dense, 512, 256, width)
        vectors = len(rows) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)
        self.top = nn.Sequential(
            _mlp(width + vectors * (vectors - 1) // 2, 512, 256), nn.Linear(256, 1)
        )

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """Return logits of shape (batch, 1); indices of shape (tables, batch) hold a row each."""
        bottom = self.bottom(dense)
        bags = [table(rows.unsqueeze(1)) for table, rows in zip(self.tables, indices)]
        vectors = torch.stack([bottom, *(bag.to(bottom.dtype) for bag in bags)], 1)
        i, j = self.pairs
        interactions = torch.bmm(vectors, vectors.transpose(1, 2))[:, i, j]
        return self.top(torch.cat([bottom, interactions], 1))


def _mlp(*widths: int) -> nn.Sequential:
    layers = [
        layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())
    ]
    return nn.Sequential(*layers)
