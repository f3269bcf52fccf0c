"""Models with random weights."""

from __future__ import annotations

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


def _conv_and_norm(width_in: int, width: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    norm = nn.BatchNorm2d(width)
    with torch.no_grad():
        nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]  # None only without running statistics
    return [nn.Conv2d(width_in, width, kernel, stride, kernel // 2, bias=False), norm]


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
