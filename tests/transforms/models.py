"""Small models of every kind, with a loss on random data for those that are trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fusedoptim._torch_private import has_bfloat16_products

BATCH = 8
CLASSES = 4


class Task(NamedTuple):
    """A model's construction, and the loss of a model on the next batch of a generator."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], Tensor]
    has_sparse_gradients: bool = False


def _real(model: nn.Module, generator: torch.Generator, *shape: int) -> Tensor:
    """Return the same values for a model of any dtype, in float64 or otherwise in float32."""
    values = torch.randn(BATCH, *shape, generator=generator)
    return values.double() if next(model.parameters()).dtype == torch.float64 else values


def _integers(generator: torch.Generator, below: int, *shape: int) -> Tensor:
    return torch.randint(below, (BATCH, *shape), generator=generator)


def _classified(logits: Tensor, generator: torch.Generator) -> Tensor:
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return cross_entropy(logits, _integers(generator, CLASSES))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),  # a bias's gradient would be rounding alone
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, CLASSES),
    )


def transformers_package() -> Any:
    """Import transformers, or skip the test without it."""
    return pytest.importorskip("transformers", reason="pip install transformers")


def _bert() -> nn.Module:
    """A BERT in which the last layer's weight is the word embeddings, and a bias has two owners."""
    transformers = transformers_package()
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model: nn.Module = transformers.BertForMaskedLM(config)
    return model


def _bert_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    tokens = _integers(generator, 50, 6)
    logits = model(input_ids=tokens).logits
    return cross_entropy(logits.flatten(0, 1).to(_wide(logits)), tokens.flatten())


def _wide(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _resnet() -> nn.Module:
    transformers = transformers_package()
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=CLASSES,
    )
    model: nn.Module = transformers.ResNetForImageClassification(config)
    return model


class _Dlrm(nn.Module):
    """Tables for categories and a network for numbers; another network takes their products."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 8, mode="sum", sparse=sparse) for rows in (40, 3, 17)
        )
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(8 + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: list[Tensor]) -> Tensor:
        x = self.bottom(numbers)
        vectors = [x, *(table(rows) for table, rows in zip(self.tables, categories))]
        products = torch.stack([v.to(x.dtype) for v in vectors], dim=1)
        interactions = products @ products.transpose(1, 2)
        rows, columns = torch.triu_indices(len(vectors), len(vectors), offset=1)
        output: Tensor = self.top(torch.cat([x, interactions[:, rows, columns]], dim=1))
        return output


def _dlrm_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    numbers = _real(model, generator, 5)
    categories = [_integers(generator, rows, 3) for rows in (40, 3, 17)]
    output = model(numbers, categories)
    return mse_loss(output.to(numbers.dtype), numbers[:, :1])


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if has_bfloat16_products:
            outputs, _ = self.lstm(x)
        else:  # torch's LSTM fails under autocast there, whether it was optimized or not
            with torch.autocast("cpu", enabled=False):
                outputs, _ = self.lstm(x.to(self.lstm.weight_ih_l0.dtype))
        logits: Tensor = self.head(outputs[:, -1])
        return logits


class _Gan(nn.Module):
    """A generator of transposed convolutions, and the critic of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(5, 8, 4, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
            nn.Tanh(),
        )
        self.critic = nn.Sequential(
            nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4)
        )


def _gan_loss(model: nn.Module, generator: torch.Generator) -> Tensor:
    """Return the sum of both players' least-squares losses."""
    images = _real(model, generator, 1, 8, 8)
    made = model.generator(_real(model, generator, 5, 1, 1)).to(images.dtype)  # type: ignore[operator]

    def judged(batch: Tensor, goal: float) -> Tensor:
        scores: Tensor = model.critic(batch).to(images.dtype)  # type: ignore[operator]
        return (scores - goal).square().mean()

    return judged(images, 1.0) + judged(made.detach(), 0.0) + judged(made, 1.0)


def _gpt2() -> nn.Module:
    transformers = transformers_package()
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


TASKS: dict[str, Task] = {
    "cnn": Task(_cnn, lambda m, g: _classified(m(_real(m, g, 1, 8, 8)), g)),
    "bert": Task(_bert, _bert_loss),
    "resnet": Task(_resnet, lambda m, g: _classified(m(_real(m, g, 3, 32, 32)).logits, g)),
    "dlrm": Task(lambda: _Dlrm(sparse=False), _dlrm_loss),
    "sparse dlrm": Task(lambda: _Dlrm(sparse=True), _dlrm_loss, has_sparse_gradients=True),
    "lstm": Task(_Lstm, lambda m, g: _classified(m(_integers(g, 20, 5)), g)),
    "gan": Task(_Gan, _gan_loss),
    "gpt2": Task(_gpt2, _bert_loss),
}


_IMAGES = (2, 3, 9, 9)
FOLDED: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...]]] = {
    "conv1d": (lambda: [nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)], (2, 3, 9)),
    "conv2d": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)], _IMAGES),
    "conv3d": (lambda: [nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8)], (2, 3, 5, 6, 7)),
    "no bias": (lambda: [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)], _IMAGES),
    "no affine": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)], _IMAGES),
    "no bias in the norm": (lambda: [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, bias=False)], _IMAGES),
    "no bias, no affine": (
        lambda: [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, affine=False)],
        _IMAGES,
    ),
    "no bias in either": (
        lambda: [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8, bias=False)],
        _IMAGES,
    ),
    "groups": (lambda: [nn.Conv2d(6, 8, 3, groups=2), nn.BatchNorm2d(8)], (2, 6, 9, 9)),
    "depthwise": (lambda: [nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8)], (2, 8, 9, 9)),
    "stride, dilation, reflection": (
        lambda: [
            nn.Conv2d(3, 8, 3, 2, 2, dilation=2, padding_mode="reflect"),
            nn.BatchNorm2d(8, eps=0.1),
        ],
        _IMAGES,
    ),
    "transposed 1d": (lambda: [nn.ConvTranspose1d(3, 8, 3), nn.BatchNorm1d(8)], (2, 3, 9)),
    "transposed 2d": (
        lambda: [nn.ConvTranspose2d(3, 8, 3, 2, 1, output_padding=1), nn.BatchNorm2d(8)],
        _IMAGES,
    ),
    "transposed, groups": (
        lambda: [nn.ConvTranspose2d(6, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8)],
        (2, 6, 5, 5),
    ),
    "transposed 3d": (lambda: [nn.ConvTranspose3d(3, 8, 2), nn.BatchNorm3d(8)], (2, 3, 4, 5, 6)),
    "linear": (lambda: [nn.Linear(5, 8), nn.BatchNorm1d(8)], (7, 5)),
    "linear, no bias": (lambda: [nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8)], (7, 5)),
}
"""Layers of which the second is folded into the first, and the shape of an input."""


class Net(nn.Module):
    """One of every kind of module that is rewritten, and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout2d(0.3)
        self.up = nn.ConvTranspose2d(8, 6, 3, groups=2)
        self.up_norm = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6, 5)
        self.norm1d = nn.BatchNorm1d(5)
        self.tied = nn.Linear(5, 5)
        self.out = nn.Linear(5, 5)
        self.out.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.conv(x)).relu())
        x = self.up_norm(self.up(x)).relu().mean((2, 3))
        return self.out(self.tied(self.norm1d(self.linear(x))).relu())


def images() -> Tensor:
    return torch.randn(4, 3, 9, 9)


def small() -> nn.Sequential:
    """A model that is trained in a moment, on images of 4 x 4."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
    )


class Block(nn.Module):
    """A convolution and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()
