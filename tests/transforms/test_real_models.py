"""Whole models, randomly initialised: right in float32 and bfloat16, and undone bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from fusedoptim import transforms
from tests.transforms.helpers import (
    assert_right,
    assert_same_state,
    copied,
    fingerprint,
    randomise,
    without_addresses,
)
from tests.transforms.models import TASKS

Inputs = dict[str, Any]


def _generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(10, 16, 4, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, groups=2),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1),
        nn.BatchNorm2d(3, affine=False),
        nn.Tanh(),
    )


def _pixels() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _categories() -> Inputs:
    rows = [torch.randint(rows, (4, 3)) for rows in (40, 3, 17)]
    return {"numbers": torch.randn(4, 5), "categories": rows}


def _tokens() -> Inputs:
    return {
        "input_ids": torch.randint(0, 50, (2, 9)),
        "attention_mask": torch.ones(2, 9, dtype=torch.long),
    }


def _resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 2, 1, 1], num_labels=3
    )
    return transformers.ResNetForImageClassification(config)


def _mobilenet() -> nn.Module:
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=32, num_labels=3)
    return transformers.MobileNetV2ForImageClassification(config)


def _levit() -> nn.Module:
    config = transformers.LevitConfig(
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        mlp_ratio=[2, 2, 2],
        attention_ratio=[2, 2, 2],
        num_labels=3,
    )
    return transformers.LevitForImageClassification(config)


class Model(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    folded: tuple[int, int] = (0, 0)
    """BatchNorms that go into a convolution, and into a Linear."""
    left: int = 0
    """BatchNorms that do not follow either."""


MODELS = {
    "ResNet": Model(_resnet, _pixels, (19, 0)),
    "MobileNetV2": Model(_mobilenet, _pixels, (52, 0)),
    "LeViT": Model(_levit, _pixels, (4, 22), left=1),
    "BERT": Model(TASKS["bert"].make, _tokens),
    "GPT-2": Model(TASKS["gpt2"].make, _tokens),
    "DLRM": Model(TASKS["dlrm"].make, _categories),
    "sparse DLRM": Model(TASKS["sparse dlrm"].make, _categories),
    "GAN": Model(_generator, lambda: {"input": torch.randn(2, 10, 1, 1)}, (3, 0)),
    "LSTM": Model(TASKS["lstm"].make, lambda: {"tokens": torch.randint(0, 20, (3, 7))}),
}
each_model = pytest.mark.parametrize("name", MODELS)


@each_model
def test_float32(name: str) -> None:
    case = MODELS[name]
    model = randomise(case.make())
    before = fingerprint(model)
    optimized = transforms.optimize(model)
    assert fingerprint(model) == before
    assert type(optimized) is type(model)
    report = transforms.report(optimized)
    knobs = ("conv_bn_folding", "linear_bn_folding")
    assert tuple(len(report.done(knob)) for knob in knobs) == case.folded
    assert sum(len(report.left(knob)) for knob in knobs) == case.left
    assert_right(optimized, model, **case.inputs())


@each_model
def test_bfloat16(name: str) -> None:
    case = MODELS[name]
    model = randomise(case.make())
    optimized = transforms.optimize(model, dtype=torch.bfloat16)
    assert_right(optimized, model, dtype=torch.bfloat16, **case.inputs())


@each_model
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_restored_bit_for_bit(name: str, dtype: torch.dtype | None) -> None:
    model = randomise(MODELS[name].make())
    before, state = fingerprint(model), copied(model.state_dict())
    optimized = transforms.optimize(model, dtype=dtype, inplace=True)
    assert optimized is model
    assert_same_state(model.state_dict(), state)
    transforms.restore(model)
    assert without_addresses(fingerprint(model)) == without_addresses(before)


@each_model
def test_checkpoints_move_both_ways(name: str) -> None:
    case = MODELS[name]
    optimized = transforms.optimize(randomise(case.make()), dtype=torch.bfloat16)
    other = randomise(case.make())
    optimized.load_state_dict(other.state_dict())
    assert_same_state(optimized.state_dict(), other.state_dict())
    inputs = case.inputs()
    assert_right(optimized, other, dtype=torch.bfloat16, **inputs)
    plain = randomise(case.make())
    plain.load_state_dict(optimized.state_dict())
    assert_same_state(plain.state_dict(), other.state_dict())
