"""Whole models, randomly initialized: right in float32 and bfloat16, and undone bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import nn

from fusedoptim import transforms
from tests.transforms.helpers import (
    CONV,
    LINEAR,
    assert_right,
    assert_same,
    assert_same_state,
    copied,
    fingerprint,
    randomise,
    tensors,
    without_addresses,
)
from tests.transforms.models import TASKS, Net, images

Inputs = dict[str, Any]


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


def _mobilenet() -> nn.Module:
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=32, num_labels=3)
    return transformers.MobileNetV2ForImageClassification(config)


def _generator() -> nn.Module:
    return TASKS["gan"].make().generator  # type: ignore[return-value]


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
    "every kind": Model(Net, lambda: {"x": images()}, (2, 1)),
    "ResNet": Model(TASKS["resnet"].make, _pixels, (6, 0)),
    "MobileNetV2": Model(_mobilenet, _pixels, (52, 0)),
    "LeViT": Model(_levit, _pixels, (4, 22), left=1),
    "BERT": Model(TASKS["bert"].make, _tokens),
    "GPT-2": Model(TASKS["gpt2"].make, _tokens),
    "DLRM": Model(TASKS["dlrm"].make, _categories),
    "sparse DLRM": Model(TASKS["sparse dlrm"].make, _categories),
    "GAN": Model(_generator, lambda: {"input": torch.randn(2, 5, 1, 1)}, (1, 0)),
    "LSTM": Model(TASKS["lstm"].make, lambda: {"tokens": torch.randint(0, 20, (3, 7))}),
}
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for dtype in (None, torch.bfloat16) for name in MODELS),
        # What float16 changes is the rounding of weights, folded ones too, by kind of module.
        *((name, torch.float16) for name in ("every kind", "BERT", "GPT-2", "DLRM", "LSTM")),
    ],
)
def test_right_and_restored_bit_for_bit(name: str, dtype: torch.dtype | None) -> None:
    case = MODELS[name]
    model, inputs = randomise(case.make()), case.inputs()
    before, state = fingerprint(model), copied(model.state_dict())
    optimized = transforms.optimize(model, dtype=dtype)
    assert fingerprint(model) == before
    assert type(optimized) is type(model)
    assert [n for n, _ in optimized.named_modules()] == [n for n, _ in model.named_modules()]
    report = transforms.report(optimized)
    assert tuple(len(report.done(knob)) for knob in (CONV, LINEAR)) == case.folded
    assert sum(len(report.left(knob)) for knob in (CONV, LINEAR)) == case.left
    if dtype != torch.float16:  # in which some of these models overflow
        assert_right(optimized, model, dtype=dtype or torch.float32, **inputs)
    assert transforms.optimize(model, dtype=dtype, inplace=True) is model
    assert_same_state(model.state_dict(), state)
    assert transforms.restore(model) is model
    assert without_addresses(fingerprint(model)) == without_addresses(before)
    with torch.no_grad():
        assert_same(tensors(model(**inputs)), tensors(transforms.restore(optimized)(**inputs)))


@each_model
def test_checkpoints_move_both_ways(name: str) -> None:
    case = MODELS[name]
    optimized = transforms.optimize(randomise(case.make()), dtype=torch.bfloat16)
    other, plain = randomise(case.make()), randomise(case.make())
    optimized.load_state_dict(other.state_dict())
    assert_same_state(optimized.state_dict(), other.state_dict())
    assert_right(optimized, other, dtype=torch.bfloat16, **case.inputs())
    plain.load_state_dict(optimized.state_dict())
    assert_same_state(plain.state_dict(), other.state_dict())
